"""Random problems on a GPU with NaN and infinities in keys, values and queries, against float64: a row depends on the keys it
sees, and on nothing else.

    python python/build.py && python bench/gpu_nonfinite.py [--count N] [--seed N] [--masks NAME ...] [--gradients [--biases]]

Rows that see a poisoned key, or whose query is poisoned, must be NaN in o and LSE (o alone if only a value is). All others
must be what they are without the poison. With --gradients, rows of d_o may be poisoned, too: a row of d_q, d_k or d_v must be NaN where it
depends on poison through the queries and keys that see each other, and else what it is without the poison. With --biases the scores
have a bias, a table that a callable captures, or sinks, whose gradients are judged in the same way. An error is a share of the norm of a row's tensor; the tolerance rule is what
`fulgurite check --engine cuda` applies.
"""

import argparse
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from gpu_random import LIMITS, output, reference  # noqa: E402


MASKS = ("causal", "window", "bool", "documents")


def drawn(rng, masks):
    """Tensors, options and the mask of a random problem."""
    dtype, dim = rng.choice(list(LIMITS)), rng.choice((64, 64, 72, 96, 128, 128, 192, 256))
    kv_heads, group, batch = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4, 7)), rng.choice((1, 2))
    n = rng.choice((1, 3, rng.randint(1, 600), rng.randint(1, 600)))
    m = rng.choice((max(n, 1), rng.randint(1, 3000), rng.randint(1, 600)))
    rows, cols = torch.arange(n, device="cuda")[:, None] + (m - n), torch.arange(m, device="cuda")[None]
    options, mask = {}, torch.ones(n, m, dtype=torch.bool, device="cuda")
    kind = rng.choice(masks)
    if kind == "causal":
        options["causal"], mask = True, cols <= rows
    elif kind == "window":
        left, right = rng.randint(0, 200), rng.randint(0, 50)
        options["window"], mask = (left, right), (cols <= rows + right) & (cols >= rows - left)
    elif kind == "bool":
        mask = torch.rand(n, m, device="cuda") < rng.choice((0.3, 0.8))
        options["mask"] = mask[None, None]
    else:
        document = torch.arange(max(n, m), device="cuda", dtype=torch.int32) // rng.randint(1, 100)
        mask = document[:n, None] == document[None, :m]
        options["mask_mod"] = lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]
    if kind != "bool" and rng.random() < 0.2:
        options["softcap"] = 20.0
    q = torch.randn(batch, n, kv_heads * group, dim, device="cuda").to(dtype)
    k, v = (torch.randn(batch, m, kv_heads, dim, device="cuda").to(dtype) for _ in range(2))
    return q, k, v, options, mask


def differences(what, name, got, want, nan, dtype):
    """What is wrong with rows of a gradient of a problem of this type. The rows in `nan` must not be finite."""
    finite = torch.isfinite(got).all(-1)
    found = []
    if (finite & nan).any():
        found.append(f"{what}: {int((finite & nan).sum())} rows of {name} hide a value that is not finite")
    if (~finite & ~nan).any():
        found.append(f"{what}: {int((~finite & ~nan).sum())} rows of {name} show a value that they do not see")
    keep = (finite & ~nan)[..., None]
    # A query that sees one key has no gradient at all, only the roundings of terms around 1 that cancel.
    least = 0.25 * float(keep.expand_as(want).sum()) ** 0.5
    error = torch.where(keep, got.double() - want, 0).norm() / max(float(torch.where(keep, want, 0).norm()), least, 1e-6)
    if not error <= LIMITS[dtype]:
        found.append(f"{what}: {name}: error {float(error):.2g}")
    return found


def with_bias(rng, options, q, k):
    """Adds a bias, a captured table or sinks to the options. Returns the tensor that has a gradient, its name, and what it adds."""
    heads, n, m = q.shape[2], q.shape[1], k.shape[1]
    kind = rng.choice(("bias", "sinks") if "mask_mod" in options else ("bias", "table", "sinks"))
    if kind == "sinks":
        leaf = options["sinks"] = torch.randn(heads, device="cuda")
        return leaf, kind, lambda x: {"sinks": x}
    if kind == "bias":
        leaf = options["bias"] = torch.randn(1, heads, n, m, device="cuda")
        return leaf, kind, lambda x: {"bias": x}
    leaf = torch.randn(heads, m, device="cuda")
    options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score + leaf[h, kv_idx]
    return leaf, kind, lambda x: {"bias": x[None, :, None, :]}


def bias_faults(what, kind, got, want, bad, mask, dtype):
    """What is wrong with the gradient of a bias, a table or sinks. `bad`: queries whose dS is NaN where they see a key."""
    per_row = (bad & mask.any(-1)).any(0)
    seen = bad.any(0)[..., None] & mask
    nan = {"sinks": per_row.any(-1), "bias": seen[None], "table": seen.any(1)}[kind]
    return differences(what, kind, got[..., None], want[..., None], nan, dtype)


def reference_with(q, k, v, d_o, mask, softcap, leaf, adds):
    """The gradients of q, k, v and of what is added to the scores, in float64."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, leaf)]
    o = output(*leaves[:3], mask, softcap, **adds(leaves[3]))
    return torch.autograd.grad(o, leaves, d_o.double())


def gradient_faults(rng, masks, biases):
    """The mistakes in the gradients of a random problem."""
    q, k, v, options, mask = drawn(rng, masks)
    d_o = torch.randn_like(q)
    if biases:
        leaf, kind, adds = with_bias(rng, options, q, k)
        *wants, want_leaf = reference_with(q, k, v, d_o, mask, options.get("softcap"), leaf, adds)
    else:
        wants = reference(q, k, v, d_o, mask, options.get("softcap"))[1:]
    batch, n, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Queries whose p is NaN, whose d_z is NaN, and whose d_o is NaN.
    bad = {name: torch.zeros(batch, heads, n, dtype=torch.bool, device="cuda") for name in ("p", "d_z", "d_o")}
    for _ in range(rng.choice((1, 2, 5))):
        b, i, h = rng.randrange(batch), rng.randrange(n), rng.randrange(heads)
        j, of = rng.randrange(k.shape[1]), slice(h // group * group, (h // group + 1) * group)
        operand = rng.choice("qkvo")
        if operand == "q":
            q[b, i, h] = math.nan
            bad["p"][b, h, i] = True
        elif operand == "o":
            d_o[b, i, h] = math.nan
            bad["d_z"][b, h, i] = bad["d_o"][b, h, i] = True
        else:
            (k if operand == "k" else v)[b, j, h // group] = math.nan
            bad["p" if operand == "k" else "d_z"][b, of] |= mask[:, j]
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    fixed = {"deterministic": rng.random() < 0.3, **options}
    gradients = fulgurite.attention_backward(d_o, q, k, v, o, lse, **fixed)
    gradients, of_biases = gradients[:3], gradients[3:]

    def keys(queries):
        """The keys that some of the queries see."""
        seen = torch.einsum("bhi,ij->bhj", queries.double(), mask.double()) > 0
        return seen.unflatten(1, (kv_heads, group)).any(2).transpose(1, 2)

    nan_q = (bad["p"] | bad["d_z"]) & mask.any(1)
    nans = (nan_q.transpose(1, 2), keys(bad["p"] | bad["d_z"]), keys(bad["p"] | bad["d_o"]))
    what = f"q {tuple(q.shape)} k {tuple(k.shape)} {q.dtype} {[name for name in fixed if fixed[name] is not False]}"
    results = zip(("d_q", "d_k", "d_v"), gradients, wants, nans)
    found = [fault for name, got, want, nan in results for fault in differences(what, name, got, want, nan, q.dtype)]
    if biases:
        found += bias_faults(what, kind, of_biases[0], want_leaf, bad["p"] | bad["d_z"], mask, q.dtype)
    return found


def faults(rng, masks):
    """The mistakes in the result of a random problem."""
    q, k, v, options, mask = drawn(rng, masks)
    want = output(*(x.double() for x in (q, k, v)), mask, options.get("softcap"))
    batch, n, heads, _ = q.shape
    group = heads // k.shape[2]
    nan_o = torch.zeros(batch, heads, n, dtype=torch.bool, device="cuda")
    nan_lse = nan_o.clone()
    for _ in range(rng.choice((1, 2, 5))):
        b, h, j = rng.randrange(batch), rng.randrange(k.shape[2]), rng.randrange(k.shape[1])
        sees = mask[:, j]
        of = slice(h * group, (h + 1) * group)
        if rng.random() < 0.5:
            # An infinite value may cancel to NaN or stay infinite: neither is finite.
            v[b, j, h] = rng.choice((math.nan, math.inf))
            nan_o[b, of] |= sees
        else:
            k[b, j, h] = math.nan
            nan_o[b, of] |= sees
            nan_lse[b, of] |= sees
    if rng.random() < 0.3:
        b, h, i = rng.randrange(batch), rng.randrange(heads), rng.randrange(n)
        q[b, i, h] = math.nan
        nan_o[b, h, i] |= bool(mask[i].any())
        nan_lse[b, h, i] |= bool(mask[i].any())
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    what = f"q {tuple(q.shape)} k {tuple(k.shape)} {q.dtype} {[name for name in options]}"
    finite = torch.isfinite(o).all(-1).transpose(1, 2)
    found = []
    if (finite & nan_o).any():
        found.append(f"{what}: {int((finite & nan_o).sum())} rows hide a value that is not finite")
    if (~finite & ~nan_o).any():
        found.append(f"{what}: {int((~finite & ~nan_o).sum())} rows show a value that they do not see")
    if (torch.isnan(lse) != nan_lse).any():
        found.append(f"{what}: the LSE of {int((torch.isnan(lse) != nan_lse).sum())} rows")
    keep = (finite & ~nan_o).transpose(1, 2)[..., None]
    error = torch.where(keep, o.double() - want, 0).norm() / max(float(torch.where(keep, want, 0).norm()), 1e-9)
    if error > LIMITS[q.dtype] and keep.any():
        found.append(f"{what}: error {float(error):.2g}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=MASKS)
    parser.add_argument("--gradients", action="store_true", help="check gradients instead of outputs")
    parser.add_argument("--biases", action="store_true", help="with --gradients: scores with a bias, a captured table, or sinks")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    found = []
    for number in range(options.count):
        if options.gradients:
            found += gradient_faults(rng, options.masks, options.biases)
        else:
            found += faults(rng, options.masks)
        if number % 20 == 19:
            print(f"{number + 1} of {options.count} problems, {len(found)} faults", flush=True)
    print(*found[:20], sep="\n")
    print(f"{options.count} problems, {len(found)} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
