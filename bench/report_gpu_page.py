"""The page docs/lab/results/gpu.html and the chart of the grid: a part of bench/report.py."""

import html
import math

from report_charts import rounded_down

# Contender: its name, and the class of its bars.
SHOWN = {"cudnn": ("cuDNN", "one"), "fa4": ("FlashAttention-4", "two"), "ours": ("fulgurite", "ours")}
STYLE = (
    "svg text{fill:#24292f;font:11px sans-serif}svg .title{font-size:14px}svg .quiet{fill:#57606a}svg .small{font-size:9px}"
    "svg .one{fill:#9aa5b1}svg .two{fill:#f0a35e}svg .ours{fill:#2f6fde}svg .grid{stroke:#e3e7eb}svg .page{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg text{fill:#e6edf3}svg .quiet{fill:#9da7b1}svg .one{fill:#6e7781}svg .two{fill:#d9863a}"
    "svg .ours{fill:#5b93f5}svg .grid{stroke:#30363d}svg .page{fill:#0d1117}}"
)
PANEL_WIDTH, PANEL_HEIGHT, TOP, LEFT = 300, 150, 44, 46


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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>',
        f'<rect class="page" width="{width}" height="{height}"/><text class="title" x="{LEFT}" y="18">{what} on an H200, bf16, TFLOP/s '
        "by sequence length; above our bars the ratio to the faster peer</text>",
    ]
    for i, (label, kind) in enumerate(SHOWN.values()):
        at = LEFT + 130 * i
        parts.append(f'<rect x="{at}" y="26" width="10" height="10" class="{kind}"/><text x="{at + 14}" y="35">{label}</text>')
    for place, ((d, causal), cells) in enumerate(found.items()):
        left = LEFT + (place % columns) * (PANEL_WIDTH + LEFT)
        bottom = TOP + (place // columns) * (PANEL_HEIGHT + 58) + PANEL_HEIGHT + 26
        parts.append(f'<text x="{left}" y="{bottom - PANEL_HEIGHT - 8}">{title(d, causal)}</text>')
        for tick in range(0, top + 1, 200):
            y = bottom - PANEL_HEIGHT * tick / top
            parts.append(f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" class="quiet">{tick}</text>')
        group = PANEL_WIDTH / len(cells)
        bar = group / (len(SHOWN) + 1)
        for j, cell in enumerate(cells):
            for i, (name, (label, kind)) in enumerate(SHOWN.items()):
                rate = cell["tflops"].get(name)
                if rate is None:
                    continue
                tall = PANEL_HEIGHT * rate / top
                x = left + j * group + (i + 0.5) * bar
                parts.append(
                    f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="{bar:.1f}" height="{tall:.1f}" class="{kind}">'
                    f"<title>{label}: {rate:.0f}</title></rect>"
                )
                if name == "ours":
                    parts.append(f'<text class="small" x="{x + bar / 2:.1f}" y="{bottom - tall - 3:.1f}" text-anchor="middle">{rounded_down(cell["ratio"])}</text>')
            middle = left + (j + 0.5) * group
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 14}" text-anchor="middle">{length(cell["n"])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean(rows):
    return math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))


def table(rows):
    """All cells in the order of the chart, fa2 and fa3 included where they ran."""
    names = [name for name in ("ours", "cudnn", "fa4", "fa3", "fa2") if any(name in row["tflops"] for row in rows)]
    units = [f"{name}, TFLOP/s" for name in names]
    head = "".join(f"<th>{name}</th>" for name in ["head dim", "mask", "length", *units, "ratio to best peer", "largest error"])
    body = []
    for row in (row for cells in panels(rows).values() for row in cells):
        cells = [row["d"], "causal" if row["causal"] else "full", length(row["n"])]
        cells += [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names]
        cells += [f"{row['ratio']:.3f}", f"{row['error']:.1e}"]
        body.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def page(machine, sections):
    style = (
        ":root{color-scheme:light dark}body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}.wide{overflow-x:auto}"
        "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #8884}svg{width:100%}"
    )
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>Attention on a GPU</title><style>{style}</style>",
        f"<h1>Attention on a GPU</h1><p>{html.escape(words)}; bf16, 16384 tokens, heads x dim 2048. "
        "Errors are relative to float64. <code>python bench/gpu.py grid backward</code></p>",
    ]
    for what, rows in sections:
        parts.append(f"<h2>{what}</h2><p>Geometric mean of the ratios to the best peer: {mean(rows):.3f}.</p>{svg(rows, what)}{table(rows)}")
    return "\n".join(parts) + "\n"
