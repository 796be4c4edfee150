"""Operators over whole tensors, by name."""

import numpy as np
import pytest

from fulgurite import ops

RNG = np.random.default_rng(7)


def matrix(rows, cols):
    return RNG.standard_normal((rows, cols), dtype=np.float32)


def rounding(x, y):
    """The error of a sum of n products in f32: n roundings of at most half a unit each."""
    return x.shape[1] * 2.0**-24 * abs(x * y).sum(1) + 1e-30


@pytest.mark.parametrize("engine", ["best", "sim"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (4, 32), (9, 257), (0, 3), (3, 0)])
def test_row_dot(engine, shape):
    x, y = matrix(*shape), matrix(*shape)
    z = ops.row_dot(x, y, engine=engine)
    want = np.einsum("ij,ij->i", x.astype(np.float64), y.astype(np.float64))
    assert z.dtype == np.float32 and z.shape == (shape[0],)
    assert (np.abs(z - want) <= rounding(x, y)).all()


def test_names_and_docs():
    assert {"row_dot", "row_softmax", "vector_add"} <= set(ops.names())
    assert "row_dot" in dir(ops)
    assert "x, y" in ops.row_dot.__doc__


def test_torch():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(matrix(3, 8))
    assert torch.equal(ops.row_dot(x, x), torch.from_numpy(ops.row_dot(x.numpy(), x.numpy())))
    with pytest.raises(ValueError, match="requires a gradient"):
        ops.row_dot(x.clone().requires_grad_(), x)


def test_cuda():
    """The kernel on a GPU, on the current stream of torch."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for rows, cols in ((1, 1), (1000, 333), (77, 4096), (0, 5)):
        x, y = (torch.randn(rows, cols, device="cuda") for _ in range(2))
        want = (x.double() * y.double()).sum(1)
        assert ((ops.row_dot(x, y) - want).abs() <= rounding(x, y)).all()
    with pytest.raises(ValueError, match="allowed: one device"):
        ops.row_dot(x, x.cpu())
    with pytest.raises(ValueError, match="allowed: contiguous"):
        ops.row_dot(*[torch.zeros(3, 2, device="cuda").t()] * 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.row_dot(matrix(2, 3)), "got 1 tensors, allowed: 2, which are x, y"),
        (lambda: ops.row_dot(*[matrix(2, 3)] * 3), "got 3 tensors"),
        (lambda: ops.row_dot(), "got 0 tensors"),
        (lambda: ops.row_dot(matrix(2, 3), matrix(3, 2)), "`y` is f32 \\[3, 2\\], allowed: f32 \\[2, 3\\]"),
        (lambda: ops.row_dot(matrix(2, 3)[0], matrix(2, 3)), "`x` is f32 \\[3\\], allowed: f32 \\[rows, cols\\]"),
        (lambda: ops.row_dot(matrix(2, 3).astype(np.float16), matrix(2, 3)), "`x` is f16"),
        (lambda: ops.row_dot(matrix(2, 3).astype(np.float64), matrix(2, 3)), "`x` is float64"),
        (lambda: ops.row_dot(matrix(2, 3), matrix(2, 3), engine="gpu"), "`engine` is \"gpu\""),
        (lambda: ops.row_dot(matrix(2, 3), matrix(2, 3), engine="cuda"), "allowed for tensors on cpu"),
        (lambda: ops.apply("row_dott", matrix(2, 3)), "allowed: vector_add"),
        (lambda: ops.row_dot("x", matrix(2, 3)), "`x` is a str"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_unknown_operator():
    with pytest.raises(AttributeError, match="no operator 'row_dott'"):
        ops.row_dott  # noqa: B018
