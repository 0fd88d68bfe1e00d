#!/usr/bin/env python3
"""Compiler launcher for CUDA sources: runs nvcc with -Xptxas -v and checks what it reports.

Spilled registers fail the compilation, unless the kernel's row in the budget file allows them and
says why; a row can also cap a kernel's registers and static shared memory. What was found is kept
beside the object as <object>.resources (one line a kernel and architecture).

    check_resources.py --budgets FILE -- nvcc ARGUMENTS...
"""
import argparse
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
NOISE = re.compile(
    r"^\s*(ptxas info\s*:|\d+ bytes stack frame|Function properties for)|bytes gmem")


def parse(text):
    """Yields (kernel, arch, registers, shared_bytes, spill_bytes) from the output of ptxas -v."""
    kernel = arch = None
    spill = 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            kernel, arch, spill = match[1], match[2], 0
        elif match := SPILL.search(line):
            spill += int(match[2]) + int(match[3])
        elif kernel and (match := USED.search(line)):
            shared = SHARED.search(line)
            yield kernel, arch, int(match[1]), int(shared[1]) if shared else 0, spill
            kernel, spill = None, 0


def read_budgets(path):
    """Rows: kernel regex, architecture regex, registers, shared bytes, spill bytes, reason."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fields = line.split(None, 5)
            if len(fields) < 6:
                sys.exit(f"{path}:{number}: wanted six columns, the last one a reason")
            rows.append((re.compile(fields[0]), re.compile(fields[1]), *map(int, fields[2:5])))
    return rows


def faults(found, budgets):
    for kernel, arch, registers, shared, spill in found:
        row = next((r for r in budgets if r[0].search(kernel) and r[1].fullmatch(arch)), None)
        limits = row[2:] if row else (255, 1 << 30, 0)
        for name, got, limit in zip(("registers", "static shared bytes", "spill bytes"),
                                    (registers, shared, spill), limits):
            if got > limit:
                yield f"{kernel} ({arch}): {name}: got {got}, wanted at most {limit}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    done = subprocess.run(command + ["-Xptxas", "-v"], stderr=subprocess.PIPE, text=True)
    for line in done.stderr.splitlines():
        if not NOISE.search(line):
            print(line, file=sys.stderr)
    if done.returncode != 0:
        return done.returncode
    found = list(parse(done.stderr))
    if "-o" in command:
        with open(command[command.index("-o") + 1] + ".resources", "w", encoding="utf-8") as file:
            file.writelines(f"{k} {a} registers={r} shared={s} spills={p}\n"
                            for k, a, r, s, p in found)
    bad = list(faults(found, read_budgets(args.budgets)))
    for fault in bad:
        print(f"error: kernel resources: {fault}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
