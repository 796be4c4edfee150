"""Draws what `train --fp4 FILE` wrote: losses over steps, smoothed, and losses on held-out text.

    python bench/plot_fp4.py FILE.csv FILE.svg
"""

import sys

COLORS = {"c": "#d1495b", "d": "#edae49", "f32": "#30638e"}
NAMES = {"c": "(c) fp4", "d": "(d) fp4, naive gradient", "f32": "f32"}
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
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    out.append(f'<text x="{left}" y="18">loss while training on (mean of {SPAN + 1} steps)</text>')
    for k in range(5):
        loss = low + (high - low) * k / 4
        out.append(f'<line x1="{left}" x2="{right}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.3f}</text>')
    for k in range(0, len(rows) + 1, max(1, len(rows) // 4)):
        out.append(f'<text x="{x(min(k, len(rows) - 1)):.1f}" y="{bottom + 18}" text-anchor="middle">{k}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(t):.1f},{y(curve[t]):.1f}" for t in range(SPAN, len(curve), 3))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="1.5"/>')
        out.append(f'<text x="{right - 150}" y="{top + 14 + 16 * i}" fill="{COLORS[name]}">{NAMES[name]}</text>')
    out.append('<text x="490" y="18">loss on text that was held out</text>')
    values = [float(value) for _, value in results]
    least, most = min(values) - 0.01, max(values)
    for i, (name, value) in enumerate(results):
        at, length = top + 14 + 52 * i, 150 * (float(value) - least) / (most - least)
        color = COLORS.get(name[0], COLORS["f32"]) if name[0] in "cd" else COLORS["f32"] if "f32" in name[:6] else "#8d96a3"
        out.append(f'<text x="490" y="{at}">{name}</text>')
        out.append(f'<rect x="490" y="{at + 6}" width="{length:.1f}" height="14" fill="{color}"/>')
        out.append(f'<text x="{496 + length:.1f}" y="{at + 18}">{float(value):.4f}</text>')
    out.append("</svg>")
    open(target, "w").write("\n".join(out) + "\n")


main()
