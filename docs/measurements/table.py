#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of benchmark rows.

usage: table.py PREFIX[,PREFIX...] COLUMN=FILE.jsonl [COLUMN=FILE.jsonl ...]
       table.py --update DOCUMENT.md

Files hold what `./dev bench ... --json` prints. Rows whose name begins with one of the prefixes are taken, in the order of the first file;
goals are the first file's too. A column of the name "" is headed "value".

--update replaces the tables of a document, each between two lines of it; paths are relative to the document:

    <!-- table PREFIX[,PREFIX...] COLUMN=FILE.jsonl [COLUMN=FILE.jsonl ...] -->
    <!-- end of table -->
"""
import json
import os
import re
import shlex
import sys

MARKED = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(path):
    with open(path, encoding="utf-8") as lines:
        return {row["name"]: row for row in map(json.loads, lines)}


def value_text(row):
    value, unit = row["value"], row["unit"]
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f} M {unit}"
    if abs(value) >= 1e3:
        return f"{value:,.0f} {unit}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e} {unit}"
    return f"{value:.3g} {unit}"


def goal_text(row):
    if row["goal"] is None:
        return ""
    return row["goal"] + (", holds" if row["holds"] else ", missed")


def table(prefixes, columns, folder="."):
    prefixes = tuple(prefixes.split(","))
    columns = [column.split("=", 1) for column in columns]
    tables = [read(os.path.join(folder, path)) for _, path in columns]
    lines = ["| row | " + " | ".join(name or "value" for name, _ in columns) + " | goal |", "| --- |" + " --- |" * (len(columns) + 1)]
    for name, row in tables[0].items():
        if name.startswith(prefixes):
            cells = [value_text(rows[name]) if name in rows else "" for rows in tables]
            lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {goal_text(row)} |")
    return "\n".join(lines) + "\n"


def update(path):
    folder = os.path.dirname(path)

    def replace(marked):
        prefixes, *columns = shlex.split(marked[2])
        return marked[1] + "\n" + table(prefixes, columns, folder) + "\n" + marked[3]

    with open(path, encoding="utf-8") as document:
        text = MARKED.sub(replace, document.read())
    with open(path, "w", encoding="utf-8") as document:
        document.write(text)


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "--update":
        update(arguments[1])
    elif len(arguments) >= 2 and all("=" in column for column in arguments[1:]):
        print(table(arguments[0], arguments[1:]), end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
