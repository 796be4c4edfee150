"""A ring on 2 and 4 gloo processes: bytes beside the closed form and `fulgurite explain --ranks`, and what overlaps.

    python python/build.py && python bench/ring_timeline.py [--length 4096] [--command target/debug/fulgurite] [--write FOLDER]

Prints, for each number of ranks and each pass: bytes that a rank hands to torch.distributed, the closed form, the prediction of
the command; time of computation, of messages (from their start until a rank knows that they have ended), of waiting, and the
share of the messages' time that computation hides. Exits with 1 if bytes differ. `--write` leaves a trace for Perfetto and a
picture of the ring of each number of ranks.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests"), str(ROOT / "bench")]

import torch  # noqa: E402
from ranks import Pool  # noqa: E402

from fulgurite import distributed as fd  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 64
COLOURS = {"compute": "#4878a8", "wait": "#c44e52", "keys": "#8fbf8f", "gradients": "#d8b365"}


def ring(group, rank, count, length):
    """(spans, bytes sent, closed form) of one rank, forward and backward."""
    make = torch.Generator().manual_seed(rank)
    layout = fd.sequence_layout(length, count)
    draw = lambda heads: torch.randn(1, layout.rows, heads, DIM, generator=make)  # noqa: E731
    q, k, v, d_o = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), draw(HEADS)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    call = dict(group=group, balance=layout, causal=True, threads=1)
    fd.context_parallel_attention(q, k, v, **call)
    found = []
    with fd.timeline() as spans, fd.traffic() as sent:
        o = fd.context_parallel_attention(q, k, v, **call, check=False)
    closed = fd.bytes_sent(q, k, v, ring=count, layout=layout, causal=True)
    found.append(([tuple(each) for each in spans], sent, closed))
    with fd.timeline() as spans, fd.traffic() as sent:
        o.backward(d_o)
    both = fd.bytes_sent(q, k, v, ring=count, layout=layout, causal=True, backward=True)
    found.append(([tuple(each) for each in spans], sent, {kind: both[kind] - closed[kind] for kind in both}))
    return found


def milliseconds(spans, kind):
    return sum(each.end - each.start for each in spans if each.kind == kind) / 1e6


def picture(path, ranks):
    """An SVG with a row of computation and a row of messages for each rank."""
    first = min(each.start for spans in ranks for each in spans)
    last = max(each.end for spans in ranks for each in spans)
    width, height = 960, 44 * len(ranks) + 40
    x = lambda at: 70 + (at - first) / (last - first) * (width - 80)  # noqa: E731
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for rank, spans in enumerate(ranks):
        top = 10 + 44 * rank
        lines.append(f'<text x="8" y="{top + 22}">rank {rank}</text>')
        for each in spans:
            row, name = (20, each.name) if each.kind == "message" else (0, each.kind)
            wide = max(x(each.end) - x(each.start), 0.5)
            lines.append(
                f'<rect x="{x(each.start):.1f}" y="{top + row}" width="{wide:.1f}" height="16" fill="{COLOURS[name]}">'
                f"<title>{each.name}: {(each.end - each.start) / 1e6:.2f} ms</title></rect>"
            )
    for at, (name, colour) in enumerate(COLOURS.items()):
        left = 70 + 130 * at
        lines.append(f'<rect x="{left}" y="{height - 22}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{left + 18}" y="{height - 12}">{name}</text>')
    lines.append(f'<text x="{width - 110}" y="{height - 12}">{(last - first) / 1e6:.0f} ms in all</text></svg>')
    Path(path).write_text("\n".join(lines) + "\n")


def predicted(command, length, count, backward):
    """The bytes that `fulgurite explain --ranks` predicts for 16-bit elements, as f32 ones: keys have twice the bytes."""
    text = [command, "explain", "--json", "--causal", "--q-len", length, "--heads", HEADS, "--kv-heads", KV_HEADS]
    text += ["--head-dim", DIM, "--ranks", count, *(["--backward"] if backward else [])]
    done = subprocess.run(list(map(str, text)), capture_output=True, text=True, check=True)
    sent = json.loads(done.stdout)["ring"]["bytes_sent"]
    return {"keys": 2 * sent["keys"], "gradients": sent["gradients"], "heads": sent["heads"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--command")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    # Ranks find the function in this module.
    from ring_timeline import ring as work

    pool, fine = Pool(), True
    for count in (2, 4):
        found = pool.run(work, count, options.length)
        for at, name in enumerate(("forward", "backward")):
            ranks = [[fd.Span(*each) for each in one[at][0]] for one in found]
            sent, closed = ([{kind: one[at][which][kind] for kind in one[at][2]} for one in found] for which in (1, 2))
            asked = predicted(options.command, options.length, count, bool(at)) if options.command else closed[0]
            same = sent == closed and all(each == asked for each in closed)
            fine &= same
            compute, message, wait = (
                sum(milliseconds(spans, kind) for spans in ranks) / count for kind in ("compute", "message", "wait")
            )
            print(
                f"{count} ranks, {name:8}: sent {sum(sent[0].values())} bytes, closed form {sum(closed[0].values())}, "
                f"explain {sum(asked.values()) if options.command else 'not asked'} {'ok' if same else 'WRONG'}; compute "
                f"{compute:.1f} ms, messages {message:.1f} ms, waiting {wait:.1f} ms, hidden "
                f"{100 * (1 - wait / max(message, 1e-9)):.0f} %",
                flush=True,
            )
        if options.write:
            ranks = [[fd.Span(*each) for part in one for each in part[0]] for one in found]
            fd.write_trace(options.write / f"ring-{count}-ranks.json", ranks)
            picture(options.write / f"ring-{count}-ranks.svg", ranks)
    pool.close()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
