"""Cost against the number of other mappings, as SVG written by hand: two logarithmic axes."""

import math

from bench.report import COLOURS, VERBS

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 330, 250, 52, 34, 42, 16
PLACES = {0: 0.0, 100: 1.0, 1000: 2.0, 10000: 3.0}
TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000)


def svg(figures, peers):
    """Three panels side by side, one a verb; None where there is nothing to draw."""
    values = [v["wall"] for k, v in figures.items() if k.startswith("others/")]
    if not values:
        return None
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    panels = [_panel(figures, peers, verb, low, high) for verb in VERBS]
    legend = _legend(figures, peers)
    width = len(VERBS) * (WIDTH + GAP)
    height = HEIGHT + 24 * ((len(legend) + 2) // 3) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * (WIDTH + GAP)},0)">{panel}</g>')
    for number, (name, title) in enumerate(legend):
        x, y = LEFT + (number % 3) * (WIDTH + GAP), HEIGHT + 12 + 24 * (number // 3)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" {_stroke(name)}/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{title}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _stroke(name):
    dash = ' stroke-dasharray="5 3"' if name.startswith("portmap") else ""
    return f'stroke="{COLOURS[name]}" stroke-width="2" fill="none"{dash}'


def _legend(figures, peers):
    drawn = [p for p in peers if any(f"/{p.name}/" in k for k in figures if k[:7] == "others/")]
    return [(p.name, p.title) for p in drawn]


def _panel(figures, peers, verb, low, high):
    right, floor = WIDTH - 8, HEIGHT - BOTTOM

    def x(others):
        return LEFT + 14 + PLACES[others] * (right - LEFT - 28) / 3

    def y(ms):
        return floor - (math.log10(ms) - low) / (high - low) * (floor - TOP)

    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-size="13">{verb}, wall ms</text>']
    for tick in TICKS:
        if low <= math.log10(tick) <= high:
            parts.append(
                f'<line x1="{LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
                'stroke="#ddd"/>'
                f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
            )
    for others in PLACES:
        parts.append(
            f'<text x="{x(others):.1f}" y="{floor + 16}" text-anchor="middle">{others:,}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{floor + 32}">other mappings on the node</text>')
    for plugin in peers:
        found = [
            (x(others), y(figures[key]["wall"]))
            for others in PLACES
            if (key := f"others/{others}/{plugin.name}/{verb}") in figures
        ]
        if found:
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in found)
            parts.append(f'<polyline points="{points}" {_stroke(plugin.name)}/>')
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{COLOURS[plugin.name]}"/>'
                for a, b in found
            ]
    return "".join(parts)
