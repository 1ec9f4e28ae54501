#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the KL of each method and context, of the JSON lines of `./dev quality --json` on standard input, as an SVG."""

import json
import math
import sys

LEFT, TOP, WIDTH, BAR, GAP = 150, 34, 460, 12, 10
LOWEST = -3  # powers of ten
HIGHEST = 1
COLOURS = ("#9ecae1", "#4292c6", "#08519c")


def place(kl):
    """Where a KL lies on the logarithmic scale."""
    power = min(max(math.log10(max(kl, 1e-9)), LOWEST), HIGHEST)
    return LEFT + WIDTH * (power - LOWEST) / (HIGHEST - LOWEST)


def text(x, y, words, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def svg(parts, width, height):
    """Elements as a whole picture, on white."""
    background = '<rect width="100%" height="100%" fill="white"/>'
    style = f'width="{width}" height="{height}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n' + "\n".join([background, *parts]) + "\n</svg>\n"


def draw(picture):
    """Writes the picture of the rows on standard input."""
    sys.stdout.write(picture([json.loads(line) for line in sys.stdin]))


def picture(rows):
    """The SVG, as text."""
    rows = [row for row in rows if row["method"] != "bf16"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    step = len(contexts) * BAR + GAP
    bottom = TOP + len(methods) * step
    parts = [text(LEFT, 14, "KL to BF16, nats a token")]
    for index, context in enumerate(contexts):
        x = LEFT + 200 + 90 * index
        parts.append(f'<rect x="{x}" y="5" width="10" height="10" fill="{COLOURS[index % 3]}"/>')
        parts.append(text(x + 14, 14, f"{context:,} tokens"))
    for power in range(LOWEST, HIGHEST + 1):
        x = place(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="#ccc"/>')
        parts.append(text(x, bottom + 14, f"{10.0**power:g}", "middle"))
    for row in rows:
        index = contexts.index(row["context"])
        y = TOP + methods.index(row["method"]) * step + index * BAR
        end = place(row["kl"])
        fill = COLOURS[index % 3]
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 2}" fill="{fill}"/>')
        parts.append(text(end + 4, y + BAR - 3, f"{row['kl']:.4f}"))
    for index, method in enumerate(methods):
        parts.append(text(LEFT - 8, TOP + index * step + step / 2 - 2, method, "end"))
    return svg(parts, LEFT + WIDTH + 60, bottom + 22)


if __name__ == "__main__":
    draw(picture)
