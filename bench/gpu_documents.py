"""Documents in one packed row on a GPU, by block mask and by callable alone, beside FlexAttention: milliseconds of both passes.

    python python/build.py && python bench/gpu_documents.py [--no-flex] [--first]

Contenders alternate in one process, medians of rounds. The callable alone has no lists: each call makes them on the device from
the traced expression, so its times include that. Block masks are made once, outside the times. Before anything is timed, outputs
and gradients by callable are compared with those by block mask; a captured call is replayed with new document numbers.

`windows by head` is a mask whose blocks differ from head to head.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from gpu_race import race  # noqa: E402

# Tokens, query heads, key/value heads, head dim, tokens of a document (None: windows by head).
SHAPES = (
    (16384, 16, 16, 128, 1638),
    (16384, 32, 8, 128, 1000),
    (8192, 16, 16, 64, 777),
    (5000, 8, 2, 96, 333),
    (2048, 16, 16, 128, 300),
    (16384, 16, 16, 128, None),
)


def error(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def check_replay(q, k, v, tokens, document):
    """A captured call makes its lists again when it is replayed."""
    ids = torch.arange(tokens, device="cuda", dtype=torch.int32) // document

    def mask(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    call = functools.partial(fulgurite.attention, q, k, v, mask_mod=mask)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for other in (document, 2 * document + 1, document // 3):
        ids.copy_(torch.arange(tokens, device="cuda", dtype=torch.int32) // other)
        graph.replay()
        assert error(o, call()) == 0, f"a replay with documents of {other} differs from a call"


def measure(shape, with_flex):
    tokens, heads, kv_heads, dim, document = shape
    q, d_o = (torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if document is None:
        widths = 64 * 2 ** (torch.arange(heads, device="cuda", dtype=torch.int32) % 8)

        def mask(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx < widths[h]) & (q_idx >= kv_idx)
    else:
        ids = torch.arange(tokens, device="cuda", dtype=torch.int32) // document

        def mask(b, h, q_idx, kv_idx):
            return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

        check_replay(q, k, v, tokens, document)

    blocks = create_block_mask(mask, None, heads if document is None else None, tokens, tokens, device="cuda")
    by_blocks, alone = {"mask_mod": mask, "block_mask": blocks}, {"mask_mod": mask}
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **by_blocks)
    o_alone, lse_alone = fulgurite.attention(q, k, v, return_lse=True, **alone)
    assert error(o_alone, o) < 1e-3 and error(lse_alone, lse) < 1e-5, "forward by callable differs"
    saved = (d_o, q, k, v, o, lse)
    for name, a, b in zip(("d_q", "d_k", "d_v"), *(fulgurite.attention_backward(*saved, **m) for m in (by_blocks, alone))):
        assert error(a, b) < 1e-3, f"{name} by block mask differs by {error(a, b):.2g}"
    dense = (d_o, q, k, v, *fulgurite.attention(q, k, v, causal=True, return_lse=True))
    calls = {
        "forward, block mask": functools.partial(fulgurite.attention, q, k, v, **by_blocks),
        "forward, callable": functools.partial(fulgurite.attention, q, k, v, **alone),
        "forward, dense causal": functools.partial(fulgurite.attention, q, k, v, causal=True),
        "backward, block mask": functools.partial(fulgurite.attention_backward, *saved, **by_blocks),
        "backward, callable": functools.partial(fulgurite.attention_backward, *saved, **alone),
        "backward, dense causal": functools.partial(fulgurite.attention_backward, *dense, causal=True),
    }
    if with_flex:
        torch._dynamo.reset()  # after eight shapes the compiler would give up, and Flex would run uncompiled
        flex = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks, enable_gqa=heads != kv_heads)
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        leaves = [x.detach().requires_grad_() for x in rows]
        graph, d = flex(*leaves), d_o.transpose(1, 2).contiguous()
        calls["forward, Flex"] = functools.partial(flex, *rows)
        calls["backward, Flex"] = functools.partial(torch.autograd.grad, graph, leaves, d, retain_graph=True)
    times = race(calls, 10)
    what = f"{tokens} tokens, heads {heads}/{kv_heads}, d {dim}, " + (f"documents of {document}" if document else "windows by head")
    print(what, *(f"{name}: {ms:.3f} ms" for name, ms in times.items()), sep="\n  ", flush=True)
    for part in ("forward", "backward"):
        own, lists = times[f"{part}, callable"], times[f"{part}, block mask"]
        flex = f", Flex {times[f'{part}, Flex'] / own:.2f}x of it" if with_flex else ""
        print(f"  {part}, callable: {own / lists:.3f} of the block mask's time{flex}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--first", action="store_true", help="the first shape and windows by head only")
    options = parser.parse_args()
    for shape in (SHAPES[0], SHAPES[-1]) if options.first else SHAPES:
        measure(shape, not options.no_flex)


if __name__ == "__main__":
    main()
