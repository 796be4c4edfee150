"""GPU memory that gradients take beside their tensors: python bench/gpu_memory.py (after python/build.py).

16384 tokens, heads x dim 2048, bf16, sequences of several lengths: what the driver has less than before the first backward call,
torch's own memory not counted. It is kept from call to call: the sums of d_q in f32, LSE and delta, counters, and the code of
kernels. If anything grew with the square of the length, it would show from line to line.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

TOKENS, WIDTH = 16384, 2048


def held():
    """Bytes of the GPU that somebody has, torch not counted."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def main():
    sums, before = TOKENS * WIDTH * 4, None
    for dim in (64, 128, 256):
        for length in (1024, 4096, 16384):
            for deterministic in (False, True):
                shape = (TOKENS // length, length, WIDTH // dim, dim)
                q, k, v, d_o = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(4))
                o = fulgurite.attention(q, k, v, causal=True, deterministic=deterministic)
                before = held() if before is None else before
                torch.autograd.grad(o, (q, k, v), d_o)
                extra = held() - before
                name = f"d {dim} length {length}{' fixed' if deterministic else ''}"
                print(f"{name}: {extra / 2**20:.1f} MiB, {extra / sums:.3f} times the sums of d_q in f32", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
