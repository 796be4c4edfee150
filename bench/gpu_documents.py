"""Documents in one packed row on a GPU, by block mask and by callable, beside FlexAttention: milliseconds of both passes.

    python python/build.py && python bench/gpu_documents.py [--no-flex]

Contenders alternate in one process, medians of rounds. The gradients by block mask are compared with those by callable first.
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

# Tokens, query heads, key/value heads, head dim, tokens of a document.
SHAPES = ((16384, 16, 16, 128, 1638), (16384, 32, 8, 128, 1000), (8192, 16, 16, 64, 777), (5000, 8, 2, 96, 333))


def measure(shape, with_flex):
    tokens, heads, kv_heads, dim, document = shape
    q, d_o = (torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ids = torch.arange(tokens, device="cuda", dtype=torch.int32) // document

    def mask(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    blocks = create_block_mask(mask, None, None, tokens, tokens, device="cuda")
    by_blocks = {"mask_mod": mask, "block_mask": blocks}
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **by_blocks)
    saved = (d_o, q, k, v, o, lse)
    for name, a, b in zip(("d_q", "d_k", "d_v"), *(fulgurite.attention_backward(*saved, **m) for m in (by_blocks, {"mask_mod": mask}))):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        assert error < 1e-3, f"{name} by block mask differs by {error:.2g}"
    dense = (d_o, q, k, v, *fulgurite.attention(q, k, v, causal=True, return_lse=True))
    calls = {
        "forward, block mask": functools.partial(fulgurite.attention, q, k, v, **by_blocks),
        "forward, callable": functools.partial(fulgurite.attention, q, k, v, mask_mod=mask),
        "backward, block mask": functools.partial(fulgurite.attention_backward, *saved, **by_blocks),
        "backward, callable": functools.partial(fulgurite.attention_backward, *saved, mask_mod=mask),
        "backward, dense causal": functools.partial(fulgurite.attention_backward, *dense, causal=True),
    }
    if with_flex:
        flex = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks, enable_gqa=heads != kv_heads)
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        leaves = [x.detach().requires_grad_() for x in rows]
        graph, d = flex(*leaves), d_o.transpose(1, 2).contiguous()
        calls["forward, Flex"] = functools.partial(flex, *rows)
        calls["backward, Flex"] = functools.partial(torch.autograd.grad, graph, leaves, d, retain_graph=True)
    print(shape, *(f"{name}: {ms:.3f} ms" for name, ms in race(calls, 10).items()), sep="\n  ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-flex", action="store_true")
    options = parser.parse_args()
    for shape in SHAPES:
        measure(shape, not options.no_flex)


if __name__ == "__main__":
    main()
