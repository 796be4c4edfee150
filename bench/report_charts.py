"""Bars of ours beside the fastest peer, as an SVG that follows the reader's light or dark scheme: a part of bench/report.py."""

import html
import math

STYLE = (
    "text{fill:#24292f;font:12px sans-serif}.small{font-size:10.5px}.quiet{fill:#57606a}.title{font-size:14px}"
    ".ours{fill:#2f6fde}.peer{fill:#9aa5b1}.axis{stroke:#d0d7de}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9da7b1}.ours{fill:#5b93f5}.peer{fill:#6e7781}"
    ".axis{stroke:#30363d}.page{fill:#0d1117}}"
)
LABELS, BARS, GAP, ROW, TOP = 118, 222, 92, 27, 66


def comparison(title, panels):
    """`panels`: (name, rows) beside each other; a row is (label, ours, (peer, rate) or None)."""
    top = max(rate for _, rows in panels for _, ours, peer in rows for rate in (ours, peer[1] if peer else 0))
    width = LABELS + len(panels) * (BARS + GAP) + 8
    height = TOP + max(len(rows) for _, rows in panels) * ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="6"/>',
        f'<text class="title" x="12" y="22">{html.escape(title)}</text>',
        '<rect class="ours" x="12" y="33" width="10" height="10"/><text x="27" y="42">fulgurite</text>',
        '<rect class="peer" x="98" y="33" width="10" height="10"/><text x="113" y="42">the fastest peer that took part, by name; beside our bar the ratio</text>',
    ]
    for place, (name, rows) in enumerate(panels):
        left = LABELS + place * (BARS + GAP)
        parts.append(f'<text class="quiet" x="{left}" y="60">{name}</text>')
        parts.append(f'<line class="axis" x1="{left - 0.5}" x2="{left - 0.5}" y1="{TOP}" y2="{TOP + len(rows) * ROW}"/>')
        for i, (label, ours, peer) in enumerate(rows):
            y = TOP + i * ROW
            if place == 0:
                parts.append(f'<text x="{left - 6}" y="{y + 16}" text-anchor="end">{html.escape(label)}</text>')
            parts.append(bar("ours", left, y + 3, ours, top))
            if peer is None:
                parts.append(f'<text class="small quiet" x="{left + BARS * ours / top + 5:.1f}" y="{y + 12}">no peer took part</text>')
                continue
            peer_name, rate = peer
            parts.append(bar("peer", left, y + 13, rate, top))
            parts.append(f'<text class="small" x="{left + BARS * ours / top + 5:.1f}" y="{y + 12}">{rounded_down(ours / rate)}x</text>')
            parts.append(f'<text class="small quiet" x="{left + BARS * rate / top + 5:.1f}" y="{y + 23}">{html.escape(peer_name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar(kind, x, y, value, top):
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{BARS * value / top:.1f}" height="9"><title>{value:.0f}</title></rect>'


def rounded_down(value):
    """Two digits: a ratio must not look better than it is."""
    return f"{math.floor(value * 100) / 100:.2f}"
