"""Attention at the speed of the machine.

>>> import numpy as np, fulgurite
>>> q = k = v = np.random.randn(1, 128, 8, 64).astype(np.float32)   # [batch, sequence, heads, head_dim]
>>> o = fulgurite.attention(q, k, v, causal=True)

NumPy arrays (float32, float16) and CPU torch tensors (float32, float16, bfloat16) are read in place, whatever
their strides, as long as the last axis is contiguous; results are of the same kind. Wrong calls raise ValueError
with a message that says what is allowed. torch's autograd is not involved: `attention_backward` gives gradients.
"""

from . import _fulgurite
from ._fulgurite import __version__, engines

__all__ = ["attention", "attention_backward", "engines", "__version__"]

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32"}


def _is_torch(array):
    return type(array).__module__.split(".")[0] == "torch" or hasattr(array, "data_ptr")


def _raw(name, array):
    """(pointer, dtype, shape, strides in elements) of an array, without a copy."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise ValueError(f"`{name}` is on {array.device}, allowed: cpu; move it with .cpu()")
        dtype = str(array.dtype).removeprefix("torch.")
        pointer, strides = array.data_ptr(), array.stride()
    elif hasattr(array, "__array_interface__"):
        dtype, size = array.dtype.name, array.itemsize
        if not array.dtype.isnative:
            raise ValueError(f"`{name}` has foreign byte order, allowed: native; convert it with .astype")
        if any(stride % size for stride in array.strides):
            raise ValueError(f"`{name}` has strides {array.strides} bytes, allowed: multiples of {size}; copy it")
        pointer, strides = array.__array_interface__["data"][0], tuple(s // size for s in array.strides)
    else:
        raise ValueError(f"`{name}` is a {type(array).__name__}, allowed: a NumPy array or a CPU torch tensor")
    return pointer, _DTYPES.get(dtype, dtype), tuple(array.shape), strides


def _empty(like, shape, dtype=None):
    """A new array of the kind of `like`; `dtype` is a name, absent it is that of `like`."""
    if _is_torch(like):
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else like.dtype)
    import numpy

    return numpy.empty(shape, dtype=dtype or like.dtype)


def _integers(name, values):
    """Offsets and lengths: any integers, as an int32 array that is contiguous."""
    if _is_torch(values):
        import torch

        return values.to(dtype=torch.int32).contiguous()
    import numpy

    values = numpy.asarray(values)
    if values.dtype.kind not in "iu":
        raise ValueError(f"`{name}` is {values.dtype}, allowed: integers")
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise ValueError(f"`{name}` reaches from {values.min()} to {values.max()}, allowed: 32-bit integers")
    return numpy.ascontiguousarray(values, dtype=numpy.int32)


class _Call:
    """The options of a call as the extension wants them, and the arrays they point into."""

    def __init__(self, causal, window, scale, softcap, sinks, alibi_slopes, cu_seqlens, used_lengths, how):
        self.alive = []
        if isinstance(causal, bool) or causal is None:
            causal = "bottom-right" if causal else None
        self.packed = cu_seqlens is not None
        cu_seqlens_q, cu_seqlens_k = self._pair("cu_seqlens", cu_seqlens)
        used_q, used_k = self._pair("used_lengths", used_lengths)
        self.options = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "softcap": softcap,
            "sinks": self._optional("sinks", sinks),
            "alibi_slopes": self._optional("alibi_slopes", alibi_slopes),
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "used_q": used_q,
            "used_k": used_k,
            **how,
        }

    def _optional(self, name, array):
        if array is None:
            return None
        self.alive.append(array)
        return _raw(name, array)

    def _pair(self, name, pair):
        if pair is None:
            return None, None
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ValueError(f"`{name}` is one {type(pair).__name__}, allowed: a pair, for queries and for keys")
        arrays = [None if each is None else _integers(name, each) for each in pair]
        return tuple(self._optional(name, array) for array in arrays)

    def lse_shape(self, q):
        return (q[1], q[0]) if self.packed else (q[0], q[2], q[1])


def _how(exp, rescale, tau, engine, threads):
    if tau is not None:
        if rescale is not None:
            raise ValueError(f"`tau` is {tau} and `rescale` is {rescale!r}; tau=T means rescale='lazy:T', give one")
        rescale = f"lazy:{tau}"
    return {"exp": exp, "rescale": rescale, "engine": engine, "threads": threads}


def _rows(name, array, packed):
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != (3 if packed else 4):
        layout = "[total, heads, head_dim]" if packed else "[batch, sequence, heads, head_dim]"
        raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {layout}")
    return shape


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    cu_seqlens=None,
    used_lengths=None,
    exp=None,
    rescale=None,
    tau=None,
    engine=None,
    threads=None,
    return_lse=False,
    out=None,
):
    """softmax(mask(modify(scale q k^T))) v, for each head.

    q, k, v       `[batch, sequence, heads, head_dim]`, or packed `[total, heads, head_dim]` with `cu_seqlens`;
                  the heads of q a multiple of those of k and v, v may have a head_dim of its own
    causal        True: the last query sees all keys ("bottom-right"); "top-left": the first query sees one
    window        (left, right): keys before and after the diagonal, both included, None is unbounded
    scale         default 1 / sqrt(head_dim)
    softcap       c tanh(score / c)
    sinks         `[heads]`: a logit for each head that joins the denominator
    alibi_slopes  float32 `[heads]`: the score falls with the distance from the diagonal
    cu_seqlens    (for q, for k): cumulative offsets, batch + 1 each
    used_lengths  (for q, for k): how much of each sequence is in use; either may be None
    exp, rescale, tau, engine, threads
                  how it is computed: the exponential, the running maximum (tau=T is rescale="lazy:T"), one of
                  `fulgurite.engines()`, the number of threads
    return_lse    also return log of the softmax denominator, float32 `[batch, heads, sequence]`
    out           write the result here

    Returns o, or (o, lse).
    """
    call = _Call(
        causal, window, scale, softcap, sinks, alibi_slopes, cu_seqlens, used_lengths,
        _how(exp, rescale, tau, engine, threads),
    )  # fmt: skip
    q_shape, v_shape = _rows("q", q, call.packed), _rows("v", v, call.packed)
    raw = _raw("q", q), _raw("k", k), _raw("v", v)
    o = _empty(q, q_shape[:-1] + v_shape[-1:]) if out is None else out
    lse = _empty(q, call.lse_shape(q_shape), "float32")
    _fulgurite.forward(*raw, (_raw("out", o), _raw("lse", lse)), call.options)
    return (o, lse) if return_lse else o


def attention_backward(
    d_o,
    q,
    k,
    v,
    o,
    lse,
    *,
    d_lse=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    cu_seqlens=None,
    used_lengths=None,
    exp=None,
    rescale=None,
    tau=None,
    engine=None,
    threads=None,
):
    """The gradients of `attention`, given what it was called with, what it returned, and the gradient of o.

    Returns (d_q, d_k, d_v), with sinks (d_q, d_k, d_v, d_sinks).
    """
    call = _Call(
        causal, window, scale, softcap, sinks, alibi_slopes, cu_seqlens, used_lengths,
        _how(exp, rescale, tau, engine, threads),
    )  # fmt: skip
    shapes = [_rows(name, array, call.packed) for name, array in (("q", q), ("k", k), ("v", v))]
    d_q, d_k, d_v = (_empty(q, shape) for shape in shapes)
    d_sinks = None if sinks is None else _empty(q, (shapes[0][-2],), "float32")
    optional = lambda name, array: None if array is None else _raw(name, array)
    saved = _raw("o", o), _raw("lse", lse), _raw("d_o", d_o), optional("d_lse", d_lse)
    gradients = _raw("d_q", d_q), _raw("d_k", d_k), _raw("d_v", d_v), optional("d_sinks", d_sinks)
    _fulgurite.backward(_raw("q", q), _raw("k", k), _raw("v", v), saved, gradients, call.options)
    return (d_q, d_k, d_v) if sinks is None else (d_q, d_k, d_v, d_sinks)
