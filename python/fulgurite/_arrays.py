"""Small helpers over arrays of any library."""

from __future__ import annotations

import sys


def is_torch(array) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_traced_by_jax(array) -> bool:
    """Whether this is an array of a JAX program that is being traced, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def shape_of(name, array, layout) -> tuple:
    """The shape of an argument that should be an array with the axes of `layout`."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ValueError(f"`{name}` is a {type(array).__name__}, allowed: an array {layout}")
    return tuple(shape)


def integers(name, values):
    """Converts offsets and lengths of any integer type to contiguous int32."""
    if is_torch(values):
        import torch

        if values.dtype == torch.int32:
            return values.contiguous()
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"`{name}` is {str(values.dtype)[6:]}, allowed: integers")
        # Arrays on a GPU are not read back, and traced arrays have no values.
        there = type(values) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
        if there and values.device.type == "cpu" and values.element_size() > 4 and values.numel():
            _fits(name, int(values.min()), int(values.max()))
        return values.to(torch.int32).contiguous()
    if is_traced_by_jax(values):
        if values.dtype.kind not in "iu":
            raise ValueError(f"`{name}` is {values.dtype}, allowed: integers")
        return values.astype("int32")
    import numpy

    values = numpy.asarray(unmasked(name, values))
    if values.dtype.kind not in "iu":
        raise ValueError(f"`{name}` is {values.dtype}, allowed: integers")
    if values.size:
        _fits(name, int(values.min()), int(values.max()))
    return numpy.ascontiguousarray(values, dtype=numpy.int32)


def _fits(name, least, most):
    if least < -(2**31) or most >= 2**31:
        raise ValueError(f"`{name}` reaches from {least} to {most}, allowed: 32-bit integers")


def unmasked(name, array):
    """Returns the array; rejects one of `numpy.ma`, because its mask would be ignored."""
    if hasattr(type(array), "harden_mask"):
        raise ValueError(f"`{name}` is a {type(array).__name__}, allowed: a plain array; use .filled(...)")
    return array


def kind_of(array) -> str:
    """The kind of elements: 'float', 'int', 'bool' or the name of another type."""
    name = str(array.dtype)
    if name.startswith("torch."):
        name = name[6:]
    if name == "bool":
        return "bool"
    for kind in ("uint", "int", "bfloat", "float"):
        if name.startswith(kind):
            return kind.replace("uint", "int").replace("bfloat", "float")
    return name


def readable(name, array):
    """Converts to a type that modifiers read: floats up to 32 bits stay, integers and booleans become int32."""
    kind, width = kind_of(array), str(array.dtype)
    if kind not in ("float", "int", "bool"):
        raise ValueError(f"`{name}` is {width}, allowed: floats, integers, booleans")
    if is_torch(array):
        import torch

        if kind == "float":
            return array.float() if array.dtype == torch.float64 else array
        return array.to(torch.int32) if kind == "bool" else integers(name, array)
    if is_traced_by_jax(array):
        types = {"float64": "float32", "bool": "int32"}
        return integers(name, array) if kind == "int" else array.astype(types.get(width, width))
    import numpy

    unmasked(name, array)

    if kind == "float":
        return numpy.asarray(array, numpy.float32) if width == "float64" else array
    if kind == "bool":
        return numpy.asarray(array, numpy.int32)
    return integers(name, array)


def needs_grad(array) -> bool:
    """Whether torch needs a gradient of this tensor."""
    if not is_torch(array):
        return False
    import torch

    return array.requires_grad and array.is_floating_point() and torch.is_grad_enabled()


def squeezed(name, array):
    """Drops the axes of size 1 of an array that broadcasts to `[batch, heads, q_len, k_len]`. Returns the array and the
    expression of its element for a score. Fewer axes mean fewer multiplications per element."""
    shape = shape_of(name, array, "that broadcasts to [batch, heads, q_len, k_len]")
    if len(shape) > 4:
        raise ValueError(f"`{name}` has {len(shape)} axes, allowed: at most [batch, heads, q_len, k_len]")
    kept = [(size, index) for size, index in zip(shape[::-1], ("k", "q", "h", "b")) if size != 1][::-1]
    at = " ".join(index for _, index in kept) or "i0"
    array = array.reshape(tuple(size for size, _ in kept) or (1,))
    return array, f"load {name} {max(1, len(kept))} {at}"


def rows(array):
    """The array with a contiguous last axis; copied only if necessary, as in flash-attn and torch."""
    if is_torch(array):
        # Most arrays are contiguous, and this question costs half as much as the stride.
        return array if array.is_contiguous() or array.stride(-1) == 1 else array.contiguous()
    strides = getattr(array, "strides", None)
    if strides and strides[-1] != array.itemsize:
        import numpy

        # A copy would lose the mask, and with it the reason to refuse the array.
        return array if hasattr(type(array), "harden_mask") else numpy.ascontiguousarray(array)
    return array
