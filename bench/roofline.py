#!/usr/bin/env python3
"""Writes docs/kernels/roofline.svg from bench/results/gpu_h200.json.

One point a measured call: floating-point operations per byte of packed cache to the right, the rate
upwards. The left roof is the copy bandwidth of that run; the right one is wgmma's measured rate
(docs/kernels/hopper.md). Standard library only, so the text is the same everywhere. With --check
nothing is written, and the exit status is 1 when the picture and the results disagree.
"""

import argparse
import json
import math
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PICTURE = REPOSITORY / "docs" / "kernels" / "roofline.svg"
WGMMA_TFLOPS = 881
GROUPS = {"A": (24, 4, 256), "B": (32, 8, 128), "C": (32, 8, 64)}  # heads, KV heads, head_dim
COLOURS = {"A": "#1b5e9b", "B": "#b8481c", "C": "#2f7d32"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 440, 64, 18, 180, 48
X_RANGE, Y_RANGE = (10, 2e5), (20, 1500)
HOPPER = re.compile(r"([ABC]), ([\d,]+) cached, q_len ([\d,]+)[:,] (share of cuDNN's rate|"
                    r"speed over the tiled|as cuda chooses)")
DECODE = re.compile(r"([ABC]), (\w+), ([\d,]+) cached: share of the floor")
TILE = re.compile(r"([AB]), ([\d,]+) cached, q_len ([\d,]+): speed over PyTorch cuDNN")


def count(text):
    return int(text.replace(",", ""))


def first_number(text):
    return float(re.search(r"[\d.]+", text).group())


def slot_bytes(preset, head_dim):
    key = {"k8v4": head_dim, "4bit_nc": head_dim // 2 + 2}.get(preset, head_dim * 3 // 8 + 2)
    return key + (head_dim * 3 // 8 if preset == "3bit_nc" else head_dim // 2) + 4


def intensity(shape, q_len, preset="4bit_nc"):
    heads, kv_heads, head_dim = GROUPS[shape]
    return 4 * head_dim * heads // kv_heads * q_len / slot_bytes(preset, head_dim)


def tflops(shape, q_len, cached, seconds):
    heads, _, head_dim = GROUPS[shape]
    return 4 * head_dim * heads * q_len * cached / seconds * 1e-12


def points(rows):
    """(kind, shape, operations per byte, TFLOP/s) of every call a row tells of."""
    for row in rows:
        if row["table"] == "decode" and (match := DECODE.match(row["name"])):
            shape, preset, cached = match.groups()
            rate = tflops(shape, 1, count(cached), first_number(row["ours"]) * 1e-6)
            yield "decode", shape, intensity(shape, 1, preset), rate
        elif row["table"] == "hopper" and (match := HOPPER.match(row["name"])):
            shape, cached, q_len, what = match.groups()
            x = intensity(shape, count(q_len))
            if what.startswith("as cuda"):
                seconds = row["value"] * 1e-3
                yield "hopper", shape, x, tflops(shape, count(q_len), count(cached), seconds)
            elif what.startswith("share"):
                yield "hopper", shape, x, first_number(row["ours"])
                yield "cudnn", shape, x, first_number(row["peer"])
            else:
                seconds = first_number(row["peer"]) * 1e-3
                yield "tiled", shape, x, tflops(shape, count(q_len), count(cached), seconds)
        elif row["table"] == "prefill" and (match := TILE.match(row["name"])):
            shape, _, q_len = match.groups()
            rate = first_number(row["ours"].split(",")[1])
            yield "tile", shape, intensity(shape, count(q_len)), rate


def at(value, value_range, begin, end):
    low, high = map(math.log, value_range)
    return f"{begin + (math.log(value) - low) / (high - low) * (end - begin):.1f}"


def x_of(value):
    return at(value, X_RANGE, LEFT, WIDTH - RIGHT)


def y_of(value):
    return at(value, Y_RANGE, HEIGHT - BOTTOM, TOP)


def text(x, y, words, anchor="start"):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def mark(kind, colour, x, y):
    filled = f'fill="{colour}"'
    hollow = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    x, y = float(x), float(y)
    square = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
    return {"hopper": f'<circle cx="{x}" cy="{y}" r="4.5" {filled}/>',
            "cudnn": f'<circle cx="{x}" cy="{y}" r="4.5" {hollow}/>',
            "decode": f'<rect {square} {filled}/>',
            "tile": f'<rect {square} {hollow}/>',
            "tiled": f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" {hollow}/>'}[kind]


def picture(results):
    rows = results["rows"]
    copy = next(row["value"] for row in rows if row["name"].startswith("device-to-device copy"))
    ridge = WGMMA_TFLOPS * 1e12 / (copy * 1e9)
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for value in (20, 50, 100, 200, 500, 1000):
        y = y_of(value)
        lines += [f'<path d="M{left} {y}H{right}" stroke="#ddd"/>',
                  text(left - 6, float(y) + 4, value, "end")]
    for value in (10, 100, 1000, 10000, 100000):
        x = x_of(value)
        lines += [f'<path d="M{x} {top}V{bottom}" stroke="#ddd"/>',
                  text(x, bottom + 17, f"{value:,}", "middle")]
    lines += [f'<path d="M{x_of(X_RANGE[0])} {y_of(X_RANGE[0] * copy * 1e-3)}L{x_of(ridge)} '
              f'{y_of(WGMMA_TFLOPS)}H{right}" fill="none" stroke="#444" stroke-width="1.5"/>',
              text(x_of(70), y_of(60 * copy * 1e-3), f"copy, {copy:,.0f} GB/s"),
              text(right - 4, float(y_of(WGMMA_TFLOPS)) - 6, f"wgmma, {WGMMA_TFLOPS} TFLOP/s",
                   "end"),
              text((left + right) // 2, HEIGHT - 10, "operations per byte of packed cache",
                   "middle"),
              f'<text x="14" y="{(top + bottom) // 2}" text-anchor="middle" '
              f'transform="rotate(-90 14 {(top + bottom) // 2})">TFLOP/s</text>']
    lines += [mark(kind, COLOURS[shape], x_of(x), y_of(y))
              for kind, shape, x, y in sorted(set(points(rows)))]
    legend = [(kind, "#444", words) for kind, words in
              (("hopper", "cuda/hopper"), ("tile", "cuda/tile"), ("decode", "cuda/rows, q_len 1"),
               ("cudnn", "cuDNN, uncompressed"), ("tiled", "tiled, on cuDNN"))]
    legend += [("hopper", colour, f"{shape}, head_dim {GROUPS[shape][2]}")
               for shape, colour in COLOURS.items()]
    for index, (kind, colour, words) in enumerate(legend):
        y = top + 14 + 20 * index
        lines += [mark(kind, colour, right + 16, y), text(right + 28, y + 4, words)]
    return "\n".join(lines + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description="The roofline picture from measured results.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it would")
    options = parser.parse_args()
    drawn = picture(json.loads((REPOSITORY / "bench" / "results" / "gpu_h200.json").read_text()))
    if not options.check:
        PICTURE.write_text(drawn)
    elif not PICTURE.exists() or PICTURE.read_text() != drawn:
        print(f"{PICTURE.relative_to(REPOSITORY)}: differs from bench/results, "
              "run bench/roofline.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
