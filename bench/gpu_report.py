"""Charts, a page and the README's table from what `gpu.py --json` wrote. Needs nothing but Python.

    python bench/gpu_report.py FORWARD.json [BACKWARD.json] [--svg FILE] [--html FILE] [--readme README.md]

The README's part lies between `<!-- begin gpu-results -->` and `<!-- end gpu-results -->`.
"""

import argparse
import html
import json
import math
from pathlib import Path

SHOWN = {"cudnn": ("cuDNN", "#9aa5b1"), "fa4": ("FlashAttention-4", "#f0a35e"), "ours": ("fulgurite", "#2f6fde")}
PANEL_WIDTH, PANEL_HEIGHT, TOP, LEFT = 300, 150, 44, 46


def read(path, part):
    """(the machine, rows) of a result file."""
    result = json.loads(path.read_text())
    return result["machine"], result[part]["rows"]


def length(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def panels(rows):
    """Rows by head dimension and mask, in order."""
    found = {}
    for row in rows:
        found.setdefault((row["d"], row["causal"]), []).append(row)
    return {key: sorted(found[key], key=lambda row: row["n"]) for key in sorted(found)}


def title(d, causal):
    return f"head dim {d}, {'causal' if causal else 'full'}"


def svg(rows, what):
    """A panel for each head dimension and mask, a group of bars for each length."""
    top_rate = max(rate for row in rows for rate in row["tflops"].values())
    top = 100 * math.ceil(top_rate / 100)
    found = panels(rows)
    columns = 2
    height = TOP + math.ceil(len(found) / columns) * (PANEL_HEIGHT + 58)
    width = columns * (PANEL_WIDTH + LEFT) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{LEFT}" y="18" font-size="14">{what}, TFLOP/s</text>',
    ]
    for i, (label, color) in enumerate(SHOWN.values()):
        at = LEFT + 130 * i
        parts.append(f'<rect x="{at}" y="26" width="10" height="10" fill="{color}"/><text x="{at + 14}" y="35">{label}</text>')
    for place, ((d, causal), cells) in enumerate(found.items()):
        left = LEFT + (place % columns) * (PANEL_WIDTH + LEFT)
        bottom = TOP + (place // columns) * (PANEL_HEIGHT + 58) + PANEL_HEIGHT + 26
        parts.append(f'<text x="{left}" y="{bottom - PANEL_HEIGHT - 8}">{title(d, causal)}</text>')
        for tick in range(0, top + 1, 200):
            y = bottom - PANEL_HEIGHT * tick / top
            parts.append(f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e7eb"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#667">{tick}</text>')
        group = PANEL_WIDTH / len(cells)
        bar = group / (len(SHOWN) + 1)
        for j, cell in enumerate(cells):
            for i, (name, (label, color)) in enumerate(SHOWN.items()):
                rate = cell["tflops"].get(name)
                if rate is None:
                    continue
                tall = PANEL_HEIGHT * rate / top
                x = left + j * group + (i + 0.5) * bar
                parts.append(
                    f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="{bar:.1f}" height="{tall:.1f}" fill="{color}">'
                    f"<title>{label}: {rate:.0f}</title></rect>"
                )
            middle = left + (j + 0.5) * group
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 14}" text-anchor="middle">{length(cell["n"])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean(rows):
    return math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))


def markdown(rows):
    """Ours, and in brackets the ratio to the best peer of the cell."""
    lengths = sorted({row["n"] for row in rows})
    lines = ["| | " + " | ".join(map(length, lengths)) + " | mean |", "| --- |" + " --- |" * (len(lengths) + 1)]
    for (d, causal), cells in panels(rows).items():
        by_length = {cell["n"]: f"{cell['tflops']['ours']:.0f} ({cell['ratio']:.2f})" for cell in cells}
        row = [by_length.get(n, "") for n in lengths]
        lines.append(f"| {title(d, causal)} | " + " | ".join(row) + f" | {mean(cells):.2f} |")
    return "\n".join(lines)


def table(rows):
    names = [name for name in ("ours", "cudnn", "fa4", "fa3", "fa2") if any(name in row["tflops"] for row in rows)]
    head = "".join(f"<th>{name}</th>" for name in ["head dim", "mask", "length", *names, "to best peer", "error"])
    body = []
    for row in rows:
        cells = [row["d"], "causal" if row["causal"] else "full", length(row["n"])]
        cells += [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names]
        cells += [f"{row['ratio']:.3f}", f"{row['error']:.1e}"]
        body.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def page(machine, sections):
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .7em;text-align:right}svg{width:100%}"
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [f"<!doctype html><meta charset='utf-8'><title>Attention on a GPU</title><style>{style}</style>"]
    parts.append(f"<h1>Attention on a GPU</h1><p>{html.escape(words)}; bf16, 16384 tokens, heads x dim 2048.</p>")
    for what, rows in sections:
        parts.append(f"<h2>{what}</h2><p>Geometric mean over the best peer {mean(rows):.3f}.</p>{svg(rows, what)}{table(rows)}")
    return "\n".join(parts) + "\n"


def put(path, name, part):
    """Replaces what lies between two markers."""
    text = path.read_text()
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"gpu_report.py: {path} has no markers `{begin}` and `{end}`")
    before, rest = text.split(begin, 1)
    path.write_text(f"{before}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end, 1)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forward", type=Path)
    parser.add_argument("backward", type=Path, nargs="?")
    for name in ("svg", "html", "readme"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    machine, rows = read(options.forward, "grid")
    sections = [("Forward", rows)]
    if options.backward:
        sections.append(("Backward", read(options.backward, "backward")[1]))
    if options.svg:
        options.svg.write_text(svg(rows, "Forward"))
    if options.html:
        options.html.write_text(page(machine, sections))
    if options.readme:
        words = ", ".join(f"{key} {value}" for key, value in machine.items())
        text = [f"{words}; bf16, 16384 tokens, heads x dim 2048, contenders alternating in one process, medians.",
                "TFLOP/s, in brackets the ratio to the best of cuDNN and FlashAttention-4 in that cell; causal counts half the products."]
        for what, rows in sections:
            text += ["", f"**{what}**: geometric mean of the ratios {mean(rows):.2f}.", "", markdown(rows)]
        put(options.readme, "gpu-results", "\n".join(text))


if __name__ == "__main__":
    main()
