"""Operators over whole tensors, by name.

Every operator that the kernels' registry lists is a function of this module:

>>> import numpy as np
>>> from fulgurite import ops
>>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
>>> ops.row_dot(x, x)
array([ 5., 50.], dtype=float32)

CUDA tensors run the kernel on the current stream of their library. Host arrays run the f64 definition, or the kernel on the
simulator with `engine="sim"`: a race or a read out of bounds in the kernel is then an error. Inputs are contiguous. These
operators have no gradients.
"""

from collections.abc import Callable
from typing import Any

from . import _fulgurite


def names() -> list[str]:
    """The names of all operators."""
    return [name for name, _, _ in _fulgurite.tensor_operators()]


def apply(name: str, *tensors: Any, engine: str = "best") -> Any:
    """Applies the operator `name`.

    `engine` is "best", "cuda" for tensors on a GPU, or "oracle" and "sim" for arrays in host memory.
    """
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "requires_grad", False) and _grad_enabled():
            raise ValueError(
                f"tensor {number} of `{name}` requires a gradient, which the operator does not have; "
                "pass tensor.detach() or call it under torch.no_grad()"
            )
    return _fulgurite.apply(name, tensors, engine)


def _grad_enabled() -> bool:
    import torch  # a tensor that requires a gradient is torch's

    return torch.is_grad_enabled()


def _function(name: str, summary: str, inputs: list[str]) -> Callable[..., Any]:
    def call(*tensors: Any, engine: str = "best") -> Any:
        return apply(name, *tensors, engine=engine)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{summary}\n\nInputs: {', '.join(inputs)}."
    return call


def __getattr__(name: str) -> Callable[..., Any]:
    for known, summary, inputs in _fulgurite.tensor_operators():
        if known == name:
            return _function(known, summary, inputs)
    raise AttributeError(f"module 'fulgurite.ops' has no operator {name!r}, it has: {', '.join(names())}")


def __dir__() -> list[str]:
    return [*globals(), *names()]
