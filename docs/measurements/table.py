#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a Markdown table of benchmark rows: table.py PREFIX[,PREFIX...] COLUMN=FILE.jsonl [COLUMN=FILE.jsonl ...]

Files hold what `./dev bench ... --json` prints. Rows whose name begins with one of the prefixes are taken, in the order of the first file;
goals are the first file's too.
"""
import json
import sys


def read(path):
    with open(path, encoding="utf-8") as lines:
        return {row["name"]: row for row in map(json.loads, lines)}


def value_text(row):
    value, unit = row["value"], row["unit"]
    if value is None:
        return "–"
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


def main(arguments):
    if len(arguments) < 2 or any("=" not in column for column in arguments[1:]):
        sys.exit(__doc__)
    prefixes = tuple(arguments[0].split(","))
    columns = [column.split("=", 1) for column in arguments[1:]]
    tables = [read(path) for _, path in columns]
    print("| row | " + " | ".join(name for name, _ in columns) + " | goal |")
    print("| --- |" + " --- |" * (len(columns) + 1))
    for name, row in tables[0].items():
        if name.startswith(prefixes):
            cells = [value_text(table[name]) if name in table else "" for table in tables]
            print(f"| `{name}` | " + " | ".join(cells) + f" | {goal_text(row)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
