"""Functions of torch in a score_mod: values and gradients against torch itself in float64."""

import pytest

torch = pytest.importorskip("torch")

from judge import close  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fulgurite  # noqa: E402

pytestmark = pytest.mark.usefixtures("judged")

FUNCTIONS = {
    "relu": lambda s: F.relu(s, inplace=False),
    "relu6": lambda s: F.relu6(s * 4),
    "silu": F.silu,
    "silu far out": lambda s: F.silu(s * 60.0) * 0.05,
    "sigmoid far out": lambda s: torch.sigmoid(s * 60.0),
    "softplus": F.softplus,
    "softplus with options": lambda s: F.softplus(s * 4, beta=2.0, threshold=3.0),
    "logsigmoid": F.logsigmoid,
    "logsigmoid far out": lambda s: F.logsigmoid(s * 60.0) * 0.05,
    "leaky_relu": lambda s: F.leaky_relu(s, negative_slope=0.2),
    "elu": lambda s: F.elu(s, alpha=0.7),
    "gelu": lambda s: F.gelu(s, approximate="tanh"),
    "hardtanh": lambda s: F.hardtanh(s, -0.5, 0.75),
    "expm1": lambda s: torch.expm1(s * 0.5),
    "expm1 of little": lambda s: torch.expm1(s * 1e-4) * 1e4,
    "frac": lambda s: torch.frac(s * 3),
    "fmod": lambda s: torch.fmod(s * 3, 1.25),
    "round": lambda s: torch.round(s * 3) + s,
    "log10": lambda s: torch.log10(s.abs() + 0.5),
    "logaddexp": lambda s: torch.logaddexp(s, -s * 2),
    "lerp": lambda s: torch.lerp(s, s * s, 0.25),
    "masked_fill": lambda s: s.masked_fill(s > 0.5, -2.0) + torch.masked_fill(s, s < 0, 1.0),
    "full_like": lambda s: s + torch.full_like(s, 1.5) * s.new_full((), 0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    function = FUNCTIONS[name]
    o = fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j: function(s))
    d_o = torch.randn(o.shape)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", *exact[:2]) * 8**-0.5
    want = torch.einsum("bhij,bjhd->bihd", function(scores).softmax(-1), exact[2])
    close(o, want)
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    for got, wanted in zip(gradients, torch.autograd.grad(want, exact, d_o.double())):
        assert got.isfinite().all()
        close(got, wanted, "d_")


def test_integers():
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    for bits in (
        lambda i, j: torch.bitwise_xor(i, j) + torch.bitwise_left_shift(i, 2) + (j >> 1),
        lambda i, j: torch.bitwise_and(i - 6, 13) - torch.bitwise_or(j, 9) + torch.bitwise_not(i),
        lambda i, j: torch.fmod(i - j, 5) + (i - j).masked_fill(i > j, 3) + torch.full_like(i, 2),
        lambda i, j: (i > j) + (i & (j > 3)),
    ):
        want = fulgurite.attention(q, k, v, bias=bits(i, j).float()[None, None])
        close(fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j, bits=bits: s + bits(i, j)), want)


def test_what_cannot_be_composed_is_named():
    q = torch.randn(1, 4, 2, 8)
    for function, message in (
        (torch.sin, "sin` cannot be traced"),
        (torch.erf, "erf` cannot be traced"),
        (F.gelu, "`gelu` with approximate='none'"),
        (lambda s: torch.round(s, decimals=2), "`round` to 2 decimals"),
        (lambda s: s.new_full((2,), 1.0), "a new tensor with axes"),
    ):
        with pytest.raises(fulgurite.TraceError, match=message):
            fulgurite.attention(q, q, q, score_mod=lambda s, b, h, i, j, function=function: function(s))


def test_dense_masks_on_a_device():
    from torch.nn.attention.flex_attention import create_mask

    table = torch.arange(7) % 3
    mask_mod = lambda b, h, i, j: torch.where(b == 0, i >= j, table[i] == table[j])
    got = fulgurite.create_mask(mask_mod, 2, 1, 7, 7, device="cpu")
    assert torch.equal(got, create_mask(mask_mod, 2, 1, 7, 7, device="cpu"))
    with pytest.raises(ValueError, match="callables with functions of torch need `device`"):
        fulgurite.create_mask(mask_mod, 2, 1, 7, 7)


def test_torch_asks_for_the_lse():
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    out, aux = fulgurite.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    want, lse = fulgurite.flex_attention(q, k, v, return_lse=True)
    assert isinstance(aux, AuxOutput) and torch.equal(aux.lse, lse) and torch.equal(out, want)


def test_shared_keys_have_gradients():
    q = torch.randn(3, 2, 5, 8)
    shared = torch.randn(1, 2, 6, 8, requires_grad=True)
    apart = shared.detach().clone().requires_grad_()
    one = torch.autograd.grad(fulgurite.flex_attention(q, shared, shared).sum(), shared)[0]
    many = apart.expand(3, -1, -1, -1)
    torch.testing.assert_close(one, torch.autograd.grad(fulgurite.flex_attention(q, many, many).sum(), apart)[0])
