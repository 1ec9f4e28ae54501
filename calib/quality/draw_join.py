#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws KL against distance from the join, a line a mode, of the JSON lines of `./dev quality --join` on standard input,
as an SVG. The lines are of one method.
"""

import math

from draw import draw, svg, text

LEFT, TOP, WIDTH, HEIGHT = 60, 40, 560, 260
COLOURS = {"joined": "#d94801", "joined-dense-tail": "#2171b5", "alone": "#555555"}
TICKS = [digit * 10.0**power for power in range(-9, 3) for digit in (1, 2, 5)]


def ticks(rows):
    """Those of the KL's axis: all KLs lie between the first and the last."""
    kls = [row["kl"] for row in rows]
    first = max(tick for tick in TICKS if tick <= min(kls))
    last = min(tick for tick in TICKS if tick >= max(kls))
    return [tick for tick in TICKS if first <= tick <= last]


def picture(rows):
    """The SVG, as text."""
    marks = ticks(rows)
    lowest, highest = math.log10(marks[0]), math.log10(marks[-1])
    distances = sorted({row["distance"] for row in rows})
    width = distances[1] - distances[0]
    end = distances[-1] + width
    bottom = TOP + HEIGHT

    def place(distance, kl):
        power = math.log10(kl)
        return LEFT + WIDTH * distance / end, bottom - HEIGHT * (power - lowest) / (highest - lowest)

    parts = [
        text(LEFT, 14, f"KL to BF16 of {rows[0]['method']}, nats a token, by tokens since the end of the prefix"),
    ]
    for mark in marks:
        _, y = place(0, mark)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + WIDTH}" stroke="#ccc"/>')
        parts.append(text(LEFT - 6, y + 4, f"{mark:g}", "end"))
    for distance in range(0, end + 1, 64):
        x, _ = place(distance, 1)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#555"/>')
        parts.append(text(x, bottom + 16, distance, "middle"))
    for index, (mode, colour) in enumerate(COLOURS.items()):
        points = [place(row["distance"] + width / 2, row["kl"]) for row in rows if row["mode"] == mode]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = LEFT + 160 * index
        parts.append(f'<path d="M{x} 26h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(x + 20, 30, mode.replace("-", ", ", 1).replace("-", " ")))
    return svg(parts, LEFT + WIDTH + 20, bottom + 24)


if __name__ == "__main__":
    draw(picture)
