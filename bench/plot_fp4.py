"""Draws what `train --fp4 FILE` wrote: losses over steps, smoothed, and losses on held-out text.

    python bench/plot_fp4.py FILE.csv FILE.svg
"""

import math
import sys

COLORS = {"c": "#d1495b", "d": "#edae49", "f32": "#30638e"}
NAMES = {"c": "(c) fp4", "d": "(d) fp4, naive gradient", "f32": "f32"}
STYLE = (
    "text{fill:#24292f}.grid{stroke:#d0d7de}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.page{fill:#0d1117}}"
)
WIDTH, HEIGHT, SPAN = 760, 340, 40


def main():
    source, target = sys.argv[1:]
    lines = [line.strip() for line in open(source) if line.strip()]
    names = lines[0].split(",")[1:]
    rows = [[float(x) for x in line.split(",")] for line in lines[1:] if not line.startswith("#")]
    results = [line[2:].rsplit(",", 1) for line in lines if line.startswith("#")]
    curves = {}
    for i, name in enumerate(names, 1):
        losses = [row[i] for row in rows]
        curves[name] = [sum(losses[max(0, t - SPAN) : t + 1]) / len(losses[max(0, t - SPAN) : t + 1]) for t in range(len(losses))]
    low = min(min(curve[SPAN:]) for curve in curves.values())
    high = max(max(curve[SPAN:]) for curve in curves.values())
    left, right, top, bottom = 56, 430, 30, 300
    x = lambda t: left + (right - left) * t / (len(rows) - 1)
    y = lambda loss: bottom - (bottom - top) * (loss - low) / (high - low)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"><style>{STYLE}</style>']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>')
    out.append(f'<text x="{left}" y="18">loss while training on (mean of {SPAN + 1} steps)</text>')
    for k in range(math.ceil(low * 10), math.floor(high * 10) + 1):
        loss = k / 10
        out.append(f'<line x1="{left}" x2="{right}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" class="grid"/>')
        out.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for k in range(0, len(rows) + 1, max(1, len(rows) // 4)):
        out.append(f'<text x="{x(min(k, len(rows) - 1)):.1f}" y="{bottom + 18}" text-anchor="middle">{k}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(t):.1f},{y(curve[t]):.1f}" for t in range(SPAN, len(curve), 3))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="1.5"/>')
        out.append(f'<text x="{right - 150}" y="{top + 14 + 16 * i}" style="fill:{COLORS[name]}">{NAMES[name]}</text>')
    out.append('<text x="490" y="18">loss on text that was held out</text>')
    values = [float(value) for _, value in results]
    # Dots on an axis that says where it begins: bars would make small differences look large.
    step = 0.02
    least, most = step * math.floor(min(values) / step), step * math.ceil(max(values) / step)
    place = lambda value: 490 + 230 * (value - least) / (most - least)
    for k in range(round((most - least) / step) + 1):
        at = place(least + k * step)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{least + k * step:.2f}</text>')
    for i, (name, value) in enumerate(results):
        y_of = top + 14 + 46 * i
        kind = name[0] if name[0] in "cd" else "f32" if "f32" in name[:6] else "other"
        out.append(f'<text x="490" y="{y_of}">{name}: {float(value):.4f}</text>')
        out.append(f'<circle cx="{place(float(value)):.1f}" cy="{y_of + 14}" r="5" fill="{COLORS.get(kind, "#8d96a3")}"/>')
    out.append("</svg>")
    open(target, "w").write("\n".join(out) + "\n")


main()
