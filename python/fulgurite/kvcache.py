"""A key/value cache of one sequence, in floating point or packed to 4 and 2 bits (TurboAttention)."""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any, Sequence

from ._arrays import shape_of
from ._describe import _integer, _number, _word
from ._fulgurite import Cache, head_bits

Array = Any
_FLOATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "f32": "f32", "f16": "f16", "bf16": "bf16"}


class KvCache:
    """Keys and values of one sequence, over which the next queries attend.

    heads, head_dim, capacity
                  key/value heads, their dimension, and the largest number of tokens
    value_dim     dimension of values; default: head_dim
    storage       "float32", "float16", "bfloat16", or "packed": 4 or 2 bits per element, with scales
    k_bits, v_bits
                  for "packed": 4 or 2 for all heads, or one number for each head; `KvCache.choose_bits` finds them
    engine, threads
                  one of `fulgurite.engines()` that runs on the CPU, and the number of threads

    >>> import numpy as np
    >>> cache = KvCache(2, 64, 4096, storage="packed", k_bits=4, v_bits=[4, 2])
    >>> k = v = np.random.default_rng(0).standard_normal((100, 2, 64), dtype=np.float32)
    >>> cache.append(k, v)
    >>> o = cache.attend(np.ones((1, 8, 64), np.float32))      # one query, eight heads over two
    >>> o.shape, len(cache)
    ((1, 8, 64), 100)
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        capacity: int,
        *,
        value_dim: int | None = None,
        storage: str = "float32",
        k_bits: int | Sequence[int] | None = None,
        v_bits: int | Sequence[int] | None = None,
        engine: str | None = None,
        threads: int | None = None,
    ) -> None:
        named = ("heads", heads), ("head_dim", head_dim), ("value_dim", head_dim if value_dim is None else value_dim)
        sizes = [max(0, int(_integer(name, value))) for name, value in (*named, ("capacity", capacity))]
        if storage == "packed":
            packed = tuple(_bits(name, value, sizes[0]) for name, value in (("k_bits", k_bits), ("v_bits", v_bits)))
            kind = None
        elif storage in _FLOATS:
            if k_bits is not None or v_bits is not None:
                name = "k_bits" if k_bits is not None else "v_bits"
                raise ValueError(f"`{name}` was given, allowed: only with storage='packed'; leave it out")
            packed, kind = None, _FLOATS[storage]
        else:
            raise ValueError(f"`storage` is {storage!r}, allowed: 'float32', 'float16', 'bfloat16', 'packed'")
        self._cache = Cache(sizes, kind, packed, *_engine(engine, threads))

    @classmethod
    def _of(cls, cache: Cache) -> KvCache:
        made = cls.__new__(cls)
        made._cache = cache
        return made

    def append(self, k: Array, v: Array) -> None:
        """Adds tokens: k `[tokens, heads, head_dim]`, v `[tokens, heads, value_dim]`. Gradients do not reach them."""
        self._cache.append(_plain(k), _plain(v))

    def attend(self, q: Array, *, scale: float | None = None, return_lse: bool = False) -> Any:
        """Attention of the last queries over the cache.

        q is `[queries, query heads, head_dim]`; its last row sees every token, and each earlier row one token fewer.
        Returns o `[queries, query heads, value_dim]` in the type of q, or (o, lse `[query heads, queries]`).
        """
        if scale is None:
            scale = 1 / math.sqrt(self._cache.spec()[0][1])
        o, lse = self._cache.attend(_plain(q), float(_number("scale", scale)))
        return (o, lse) if return_lse else o

    def truncate(self, length: int) -> None:
        """Removes all but the first `length` tokens."""
        length = int(_integer("length", length))
        if not 0 <= length <= len(self):
            raise ValueError(f"`length` is {length}, allowed: 0 to {len(self)}, the tokens in the cache")
        self._cache.truncate(length)

    def fork(self) -> KvCache:
        """An independent copy, as for another continuation of the same prompt."""
        return self._of(self._cache.fork())

    def token(self, token: int, head: int) -> tuple[list[float], list[float]]:
        """Key and value of a token in one head, as the cache holds them."""
        count, heads = len(self), self._cache.spec()[0][0]
        for name, value, most in (("token", token, count), ("head", head, heads)):
            if not 0 <= int(_integer(name, value)) < most:
                raise ValueError(f"`{name}` is {value}, allowed: 0 to {most - 1}")
        k, v = self._cache.get(token, head) or ([], [])
        return k, v

    def __len__(self) -> int:
        return self._cache.usage()[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tokens, with scales."""
        return self._cache.usage()[1]

    @property
    def bits_per_element(self) -> float:
        """Bits per element, with scales."""
        return self._cache.usage()[2]

    @property
    def capacity(self) -> int:
        """The largest number of tokens."""
        return self._cache.spec()[0][3]

    def __repr__(self) -> str:
        (heads, dim, value_dim, capacity), kind, packed = self._cache.spec()
        stored = kind if packed is None else f"packed, k_bits={packed[0]}, v_bits={packed[1]}"
        return f"KvCache(heads={heads}, dims=({dim}, {value_dim}), {len(self)} of {capacity} tokens, {stored})"

    @staticmethod
    def choose_bits(rows: Array, two: int) -> list[int]:
        """Bits of each head from keys or values `[tokens, heads, dim]` of sample data.

        `two` heads get 2 bits: those whose channels differ least in their ranges. The others get 4.
        """
        shape = shape_of("rows", rows, "[tokens, heads, dim]")
        if len(shape) != 3:
            raise ValueError(f"`rows` has shape {list(shape)}, allowed: [tokens, heads, dim]")
        return list(head_bits(_plain(rows), max(0, int(_integer("two", two)))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, which `fulgurite cache` of the command also reads."""
        words, arrays = self._cache.save()
        head: dict[str, Any] = {"__metadata__": words}
        at = 0
        for name, data in arrays.items():
            head[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for data in arrays.values():
                file.write(bytes(data))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, engine: str | None = None, threads: int | None = None) -> KvCache:
        """Reads a file that `save` wrote. A damaged file raises ValueError."""
        with open(path, "rb") as file:
            data = file.read()
        damaged = f"`path` is {os.fspath(path)!r}, which is not a whole safetensors file, allowed: what `save` wrote"
        try:
            size = struct.unpack_from("<Q", data)[0]
            head = json.loads(data[8 : 8 + size])
            words = head.pop("__metadata__", {})
            body = data[8 + size :]
            arrays = {}
            for name, entry in head.items():
                start, end = entry["data_offsets"]
                if not 0 <= start <= end <= len(body):
                    raise ValueError
                arrays[name] = body[start:end]
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ValueError(damaged) from cause
        return cls._of(Cache.load((words, arrays), *_engine(engine, threads)))


def _engine(engine, threads):
    name = "best" if engine is None else _word("engine", engine)
    return name, None if threads is None else int(_integer("threads", threads))


def _bits(name, value, heads):
    if value is None:
        value = 4
    if hasattr(value, "__index__"):
        value = [value] * heads
    bits = [int(_integer(name, each)) for each in value]
    if any(each not in (2, 4) for each in bits):
        raise ValueError(f"`{name}` is {bits}, allowed: 4 or 2 for each head")
    return bits


def _plain(array):
    """The array without its gradient: the cache keeps copies."""
    return array.detach() if hasattr(array, "detach") else array
