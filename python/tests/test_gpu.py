"""Tensors of a Hopper GPU: models of transformers in bf16 against eager and sdpa, and JAX arrays."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)
transformers = pytest.importorskip("transformers")

import test_transformers as small  # noqa: E402
from judge import close, judged  # noqa: E402

import fulgurite  # noqa: E402


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch):
    """Heads of 64, as models for a GPU have them."""
    monkeypatch.setattr(small, "SIZES", {**small.SIZES, "hidden_size": 256, "head_dim": 64})
    # All experts, always: with a choice, rounding would change who is asked.
    family, options = small.MODELS["gpt_oss"]
    monkeypatch.setitem(small.MODELS, "gpt_oss", (family, {**options, "num_experts_per_tok": 2}))


def pair(name):
    return [model.to("cuda", torch.bfloat16) for model in small.pair(name)]


def padded(side):
    return {key: value.cuda() for key, value in small.padded(side).items()}


def models_agree(got, want, share=0.03):
    """Two libraries' logits of a whole model: bf16 noise grows through layers, and is compared with their spread."""
    got, want = got.double(), want.double()
    assert (got - want).abs().max() <= share * want.std() * 4 + 1e-3


def exact(*tensors):
    """The same tensors in float64, to be differentiated."""
    return [x.detach().double().requires_grad_() for x in tensors]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", small.MODELS)
def test_prefill(name, side):
    ours, theirs = pair(name)
    batch = padded(side)
    keep = batch["attention_mask"].bool()
    if side == "none":
        batch["attention_mask"], keep = None, torch.ones_like(keep)
    with torch.no_grad():
        got, want = ours.eval()(**batch).logits, theirs.eval()(**batch).logits
    models_agree(got[keep], want[keep])


@pytest.mark.parametrize("name", small.MODELS)
def test_generation(name):
    """Token by token over a cache, on the tokens that the peer chooses."""
    ours, theirs = pair(name)
    batch = padded("left")
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want = theirs.eval().generate(**batch, **options)
    ids, mask, cache = batch["input_ids"], batch["attention_mask"], None
    with torch.no_grad():
        for step, logits in enumerate(want.logits):
            out = ours.eval()(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            models_agree(out.logits[:, -1], logits)
            cache = out.past_key_values
            ids = want.sequences[:, batch["input_ids"].shape[1] + step, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
    assert ours.generate(**batch, max_new_tokens=3, do_sample=False).shape[1] == batch["input_ids"].shape[1] + 3


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("name", small.MODELS)
def test_training(name, side):
    ours, theirs = pair(name)
    batch = padded("right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if side == "none":
        batch["attention_mask"] = None
    losses = [small.trained(each, batch) for each in (ours, theirs)]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), atol=3e-2, rtol=2e-2)


def test_compile():
    torch._dynamo.reset()
    ours, _ = pair("llama")
    batch = padded("none")
    batch["attention_mask"] = None
    with torch.no_grad():
        want = ours.eval()(**batch, use_cache=False).logits
        got = torch.compile(ours, fullgraph=False)(**batch, use_cache=False).logits
    models_agree(got, want)


def test_variable_lengths_have_gradients():
    torch.manual_seed(0)
    lengths = [5, 130, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    with judged():
        o = fulgurite.flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), causal=True)
        d_o = torch.randn_like(o)
        got = torch.autograd.grad(o, (q, k, v), d_o)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows, parts = exact(q, k, v), []
    for start, end in zip(cu[:-1], cu[1:]):
        one = [x[start:end].transpose(0, 1)[None] for x in rows]
        parts.append(sdpa(*one, is_causal=True)[0].transpose(0, 1))
    want = torch.autograd.grad(torch.cat(parts), rows, d_o.double())
    for a, b, name in zip(got, want, ("d_q", "d_k", "d_v")):
        close(a, b, name)


def test_modifiers_have_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    bias = torch.randn(200, device="cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh(score / 20) + bias[kv_idx]

    with judged():
        o = fulgurite.attention(q, k, v, causal=True, score_mod=score_mod)
        d_o = torch.randn_like(o)
        got = torch.autograd.grad(o, (q, k, v), d_o)
    rows = exact(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", *rows[:2]) / 8
    scores = 20 * torch.tanh(scores / 20) + bias
    scores = scores.masked_fill(torch.ones(200, 200, device="cuda").triu(1).bool(), float("-inf"))
    plain = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), rows[2])
    for a, b, name in zip(got, torch.autograd.grad(plain, rows, d_o.double()), ("d_q", "d_k", "d_v")):
        close(a, b, name)


@pytest.mark.parametrize("queries", [1, 150])
def test_without_keys(queries):
    """Rows of zeros; nothing is read of tensors that have no elements."""
    q = torch.randn(2, queries, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.zeros(2, 0, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    bias = torch.zeros(queries, 0, device="cuda", requires_grad=True)
    o = fulgurite.attention(q, k, v, causal=True, bias=bias)
    d_q, d_k, d_v, d_bias = torch.autograd.grad(o, (q, k, v, bias), torch.ones_like(o))
    torch.cuda.synchronize()
    assert not o.any() and not d_q.any()
    assert (d_k.shape, d_v.shape, d_bias.shape) == (k.shape, v.shape, bias.shape)


@pytest.mark.parametrize("dim", [64, 100, 7])
def test_gradients_of_rows_that_must_be_copied(dim):
    """Rows that lie between others, and head dims that are no multiple of 8."""
    torch.manual_seed(0)
    whole = torch.randn(1, 200, 2, 3 * dim + 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (whole[..., i * dim + 1 :][..., :dim] for i in range(3))
    with judged():
        o = fulgurite.attention(q, k, v, causal=True)
        d_o = torch.randn_like(o)
        (got,) = torch.autograd.grad(o, whole, d_o)
    (rows,) = exact(whole)
    q, k, v = (rows[..., i * dim + 1 :][..., :dim] for i in range(3))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / dim**0.5
    hidden = torch.ones(200, 200, device="cuda").triu(1).bool()
    plain = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    (want,) = torch.autograd.grad(plain, rows, d_o.double())
    close(got, want, "d_")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_gradients_have_the_same_bits(dim):
    """d_q, and the gradient of a bias that all heads and sequences share."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    bias = torch.randn(700, 700, device="cuda", requires_grad=True)
    d_o = torch.randn_like(q)

    def gradients(**options):
        o = fulgurite.attention(q, k, v, causal=True, bias=bias, **options)
        return torch.autograd.grad(o, (q, k, v, bias), d_o)

    # The oracle takes a minute for wider rows.
    with judged() if dim == 64 else contextlib.nullcontext():
        gradients()
        first = gradients(deterministic=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(deterministic=True)))


@pytest.mark.parametrize("size", [128, (32, 40)])
def test_block_masks_have_gradients(size):
    """Two sequences with masks of their own: documents of 100 positions, and a window. Also in blocks that no tile divides."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")

    def mask_mod(b, h, q_idx, kv_idx):
        return ((b == 0) & (q_idx // 100 == kv_idx // 100)) | ((b == 1) & (q_idx - kv_idx < 50) & (q_idx >= kv_idx))

    blocks = fulgurite.create_block_mask(mask_mod, 2, None, 300, 300, device="cuda", BLOCK_SIZE=size)
    with judged():
        o = fulgurite.attention(q, k, v, block_mask=blocks)
        d_o = torch.randn_like(o)
        got = torch.autograd.grad(o, (q, k, v), d_o)
    i, j = torch.arange(300, device="cuda")[:, None], torch.arange(300, device="cuda")
    seen = torch.stack([i // 100 == j // 100, (i - j < 50) & (i >= j)])[:, None]
    rows = exact(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", *rows[:2]) / 8
    plain = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), rows[2])
    wanted = (plain, *torch.autograd.grad(plain, rows, d_o.double()))
    for a, b, name in zip((o, *got), wanted, ("o", "d_q", "d_k", "d_v")):
        close(a, b, name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("data", ["plain", "growing", "hundreds", "tiny first", "alone"])
def test_without_lse(data, causal):
    """Nobody reads the LSE: rows are added up as they are rounded, also where maxima grow from block to block."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 700, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if data == "growing":
        # Blocks come from the last to the first.
        k *= torch.linspace(40, 0.1, 700, device="cuda").bfloat16()[:, None, None]
    elif data == "hundreds":
        q, k = q * 10, k * 10
    elif data == "tiny first":
        k[:, 512:] *= 1e-3
        k[:, :512] *= 30
    elif data == "alone":
        k, v = k[:, :1], v[:, :1]
        causal = False
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    if causal:
        s += torch.full((700, 700), float("-inf"), device="cuda").triu(1)
    p = s.softmax(-1)
    with judged():
        got = fulgurite.attention(q, k, v, causal=causal)
    close(got, torch.einsum("bhqk,bkhd->bqhd", p, v.double()))
    assert torch.equal(got, fulgurite.attention(q, k, v, causal=causal))


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU")
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 64)).astype(jax.numpy.bfloat16)
    o = fulgurite.attention(q, q, q, causal=True)
    assert isinstance(o, jax.Array) and next(iter(o.devices())).platform == "gpu"
    # The same bits as on a tensor of torch, which other tests judge.
    same = torch.from_dlpack(q)
    assert torch.equal(torch.from_dlpack(o), fulgurite.attention(same, same, same, causal=True))


def test_a_repeated_call_reads_its_arrays_again():
    """A call with the arrays of an earlier one skips the checks, but not what tells two arrays apart."""
    q, k, v = (torch.randn(1, 40, 2, 64, device="cuda").bfloat16() for _ in range(3))
    out = torch.empty_like(q)
    first = fulgurite.attention(q, k, v, out=out).clone()
    assert torch.equal(fulgurite.attention(q, k, v, out=out), first)
    assert torch.equal(fulgurite.attention(torch._neg_view(q), k, v), fulgurite.attention(-q, k, v))
    turned = out.view(1, 2, 40, 64).transpose(1, 2)  # the same memory with other strides
    assert torch.equal(fulgurite.attention(q, k, v, out=turned), first)
    with pytest.raises(ValueError, match="out"):
        fulgurite.attention(q, k, v, out=out[:, :20])
    q.mul_(2)
    assert torch.equal(fulgurite.attention(q, k, v, out=out), fulgurite.attention(q.clone(), k, v))
