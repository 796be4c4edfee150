"""Common code of the estimators: scikit-learn's conventions, without scikit-learn."""

from __future__ import annotations

import inspect

from ._arrays import unmasked


def rows_of(name, array):
    """Converts anything that NumPy can read to contiguous rows of float32."""
    import numpy as np

    if hasattr(array, "detach"):
        array = array.detach()
    values = np.asarray(unmasked(name, array))
    if values.ndim != 2:
        raise ValueError(f"`{name}` has {values.ndim} axes, allowed: 2 (rows of elements); reshape it")
    if values.dtype.kind not in "fiub":
        raise ValueError(f"`{name}` is {values.dtype}, allowed: numbers; convert it")
    return np.ascontiguousarray(values, dtype=np.float32)


class Estimator:
    """Parameters by name, as in scikit-learn."""

    @classmethod
    def _names(cls):
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep=True):
        """The parameters of the constructor."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params):
        """Changes parameters of the constructor."""
        for name, value in params.items():
            if name not in self._names():
                raise ValueError(f"`{name}` is no parameter of {type(self).__name__}, allowed: {', '.join(self._names())}")
            setattr(self, name, value)
        return self

    def __repr__(self):
        signature = inspect.signature(type(self).__init__).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value is not signature[name].default and not (
                isinstance(value, (int, float, str)) and value == signature[name].default
            )
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _fitted(self, attribute):
        value = getattr(self, attribute, None)
        if value is None:
            raise ValueError(f"this {type(self).__name__} is not fitted; call fit first")
        return value


def whole(name, value, most):
    """An integer as Rust takes it; Rust reports numbers that are too large."""
    import operator

    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ValueError(f"`{name}` is {value!r}, allowed: 1 to {most}")
    return number


def threads_of(n_threads):
    """A number of threads as Rust takes it; None means one for each core."""
    number = None if n_threads is None else whole("n_threads", n_threads, 4096)
    if number is not None and not 1 <= number <= 4096:
        raise ValueError(f"`n_threads` is {n_threads!r}, allowed: 1 to 4096, or None for one for each core")
    return number


def seed_of(random_state):
    """A seed from scikit-learn's random_state: a number, or None for 0 (results are reproducible by default)."""
    if random_state is None:
        return 0
    try:
        seed = int(random_state)
    except (TypeError, ValueError):
        raise ValueError(f"`random_state` is {random_state!r}, allowed: a whole number or None") from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"`random_state` is {seed}, allowed: 0 to 2**64 - 1")
    return seed
