"""Small helpers over arrays of any library."""

from __future__ import annotations

import sys


def is_torch(array) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def shape_of(name, array, layout) -> tuple:
    """The shape of what should be an array with the axes of `layout`."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ValueError(f"`{name}` is a {type(array).__name__}, allowed: an array {layout}")
    return tuple(shape)


def integers(name, values):
    """Offsets and lengths: any integers, as int32 and contiguous."""
    if is_torch(values):
        import torch

        if values.dtype == torch.int32:
            return values.contiguous()
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"`{name}` is {str(values.dtype)[6:]}, allowed: integers")
        return values.to(torch.int32).contiguous()
    import numpy

    values = numpy.asarray(values)
    if values.dtype.kind not in "iu":
        raise ValueError(f"`{name}` is {values.dtype}, allowed: integers")
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise ValueError(f"`{name}` reaches from {values.min()} to {values.max()}, allowed: 32-bit integers")
    return numpy.ascontiguousarray(values, dtype=numpy.int32)


def kind_of(array) -> str:
    """'float', 'int', 'bool' or the name of another type."""
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
    """The array with elements that modifiers read: floats up to 32 bits as they are, integers and booleans as int32."""
    kind, width = kind_of(array), str(array.dtype)
    if kind not in ("float", "int", "bool"):
        raise ValueError(f"`{name}` is {width}, allowed: floats, integers, booleans")
    if is_torch(array):
        import torch

        if kind == "float":
            return array.float() if array.dtype == torch.float64 else array
        return array.to(torch.int32)
    import numpy

    if kind == "float":
        return numpy.asarray(array, numpy.float32) if width == "float64" else array
    if kind == "bool":
        return numpy.asarray(array, numpy.int32)
    return integers(name, array)


def needs_grad(array) -> bool:
    """Whether torch wants a gradient of this."""
    if not is_torch(array):
        return False
    import torch

    return array.requires_grad and array.is_floating_point() and torch.is_grad_enabled()


def four_axes(name, array):
    """The array with axes of size 1 in front, as `[batch, heads, q_len, k_len]`."""
    rank = len(shape_of(name, array, "that broadcasts to [batch, heads, q_len, k_len]"))
    if rank > 4:
        raise ValueError(f"`{name}` has {rank} axes, allowed: at most [batch, heads, q_len, k_len]")
    return array.reshape((1,) * (4 - rank) + tuple(array.shape))


def broadcast_load(name, shape) -> str:
    """The element of a four-axis tensor that belongs to a score; axes of size 1 are repeated."""
    at = " ".join("i0" if size == 1 else index for size, index in zip(shape, ("b", "h", "q", "k")))
    return f"load {name} 4 {at}"
