#!/usr/bin/env python3
"""Writes the Markdown tables of docs/*.md from bench/results/*.json.

A line `<!-- results: cpu/gemm -->` opens the table "gemm" of results/cpu.json and the next
`<!-- end results -->` closes it; what lies between is generated. `cpu/machine` gives the line that
names machine, commit, versions and command. With --check nothing is written, and the exit status
is 1 when a document and the results disagree.
"""

import argparse
import json
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- results: (\w+)/(\w+) -->\n).*?(<!-- end results -->)", re.DOTALL)


def number(value):
    """Three significant digits; an exponent only for what would be lost without."""
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2}f}"


def bar(row):
    if row["at_least"] is not None:
        return f"at least {row['at_least']:g}"
    if row["at_most"] is not None:
        return f"at most {row['at_most']:g}"
    return ""


def machine_text(results):
    machine = results["machine"]
    tools = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    changes = " with uncommitted changes" if results["uncommitted_changes"] else ""
    commit = results["commit"][:12]
    parts = (f"{machine['cpu']}, {machine['cores']} cores" if "cpu" in machine else
             f"{machine['gpu']}, {machine['sms']} SMs, {machine['memory_gib']} GiB")
    return (f"{parts}; commit `{commit}`{changes}; {tools}.\n"
            f"`{results['command']}`\n")


def table_text(results, name):
    rows = [row for row in results["rows"] if row["table"] == name]
    if not rows:
        raise SystemExit(f"results: got no rows of table {name}")
    if "cells" in rows[0]:  # written out by the program that measured
        cells = [list(rows[0]["cells"])] + [list(row["cells"].values()) for row in rows]
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        lines.insert(1, "|---" * len(cells[0]) + "|")
        return "\n".join(lines) + "\n"
    # A column that no row fills is left out.
    columns = [("what", lambda row: row["name"]), ("kvtile", lambda row: row["ours"]),
               ("peer", lambda row: row["peer"]),
               ("result", lambda row: f"**{number(row['value'])}** {row['unit']}".strip()),
               ("quartiles", lambda row: f"{number(row['low'])} to {number(row['high'])}"
                if row["samples"] > 1 else ""),
               ("wanted", bar),
               ("", lambda row: "" if not bar(row) else "met" if row["met"] else "missed")]
    columns = [(title, cell) for title, cell in columns if any(cell(row) for row in rows)]
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def render(text):
    def block(match):
        opening, file_name, table, closing = match.groups()
        path = REPOSITORY / "bench" / "results" / f"{file_name}.json"
        if not path.exists():
            raise SystemExit(f"bench/results/{file_name}.json: not there, but a document shows it")
        results = json.loads(path.read_text())
        body = machine_text(results) if table == "machine" else table_text(results, table)
        return opening + body + closing

    return BLOCK.sub(block, text)


def main():
    parser = argparse.ArgumentParser(description="Tables of the documents from measured results.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it would")
    parser.add_argument("documents", nargs="*",
                        default=["docs/performance.md", "docs/quality.md", "docs/vllm.md", *sorted(
                            str(path.relative_to(REPOSITORY))
                            for path in (REPOSITORY / "docs" / "kernels").glob("*.md"))],
                        help="relative to the repository")
    options = parser.parse_args()
    differing = []
    for document in options.documents:
        path = REPOSITORY / document
        text = path.read_text()
        rendered = render(text)
        if rendered != text:
            differing.append(document)
            if not options.check:
                path.write_text(rendered)
    if options.check and differing:
        print(f"{', '.join(differing)}: differs from bench/results, run bench/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
