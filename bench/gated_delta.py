"""The chunked gated delta rule in PyTorch on the CPU, from the formulas, and what it takes.

One chunk at a time over all heads, with every product a batched matmul: what a careful user of PyTorch writes.
`python bench/gated_delta.py [tokens] [value heads] [key heads] [dim] [dtype] [rounds]` prints JSON; run it right
before or after `cargo run --release -p fulgurite-cpu --example around gated-delta` on a quiet machine.
"""

import json
import statistics
import sys
import time

import torch


def recurrent(q, k, v, g, beta, scale):
    """Token by token, the definition; [heads, tokens, dim]."""
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=q.dtype)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[:, None, None]
        error = v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t])
        state = state + torch.einsum("hk,hv->hkv", k[:, t], beta[:, t, None] * error)
        out.append(scale * torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(out, 1)


def chunked(q, k, v, g, beta, scale, chunk=64):
    """The ungated inverse: A = (1 + strictly lower(beta K K^T))^-1, gates between rows multiplied in afterwards."""
    heads, tokens, dim = q.shape
    n = tokens // chunk
    cut = lambda x: x.reshape(heads, n, chunk, *x.shape[2:])
    q, k, v, g, beta = cut(q), cut(k), cut(v), cut(g).cumsum(-1), cut(beta)
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta[..., None] * (k @ k.transpose(-1, -2))).tril(-1).float()
    eye = torch.eye(chunk)
    inverse = torch.linalg.solve_triangular(system + eye, eye.expand_as(system), upper=False, unitriangular=True)
    corrected = (decay * (inverse * beta[..., None, :].float())).to(q.dtype)
    scores = scale * (q @ k.transpose(-1, -2)) * decay.to(q.dtype)
    head, tail = g.exp(), (g[..., -1:] - g).exp()
    state = torch.zeros(heads, dim, v.shape[-1])
    out = torch.empty_like(v)
    for i in range(n):
        low = state.to(q.dtype)
        w = v[:, i] - head[:, i, :, None].to(q.dtype) * (k[:, i] @ low)
        new = corrected[:, i] @ w
        out[:, i] = (scale * head[:, i])[..., None].to(q.dtype) * (q[:, i] @ low) + scores[:, i] @ new
        weighted = (tail[:, i, :, None] * new).to(q.dtype)
        state = head[:, i, -1, None, None] * state + (k[:, i].transpose(-1, -2) @ weighted).float()
    return out.reshape(heads, tokens, -1)


def inputs(tokens, heads, key_heads, dim, dtype):
    torch.manual_seed(1)
    normal = lambda *shape: torch.nn.functional.normalize(torch.randn(*shape), dim=-1)
    q, k = (normal(key_heads, tokens, dim).repeat_interleave(heads // key_heads, 0).to(dtype) for _ in range(2))
    v = torch.randn(heads, tokens, dim).to(dtype)
    g = -0.1 * torch.nn.functional.softplus(torch.randn(heads, tokens)) / 0.8
    return q, k, v, g, torch.randn(heads, tokens).sigmoid()


def main():
    arg = lambda i, default: type(default)(sys.argv[i]) if len(sys.argv) > i else default
    tokens, heads, key_heads, dim = arg(1, 4096), arg(2, 32), arg(3, 16), arg(4, 128)
    dtype, rounds = getattr(torch, arg(5, "float32")), arg(6, 5)
    torch.set_num_threads(2)
    small = [x.double() for x in inputs(128, 2, 1, 16, torch.float32)]
    want, got = recurrent(*small, 0.25), chunked(*(x.float() for x in small), 0.25)
    assert (got - want).abs().max() < 1e-4, (got - want).abs().max()
    case = inputs(tokens, heads, key_heads, dim, dtype)
    times = []
    with torch.no_grad():
        chunked(*case, dim**-0.5)
        for _ in range(rounds):
            start = time.perf_counter()
            chunked(*case, dim**-0.5)
            times.append(time.perf_counter() - start)
    print(json.dumps({"what": f"PyTorch {torch.__version__} chunked, {str(dtype)[6:]}, {tokens} tokens, {heads} heads, d {dim}",
                      "seconds": statistics.median(times)}))


if __name__ == "__main__":
    main()
