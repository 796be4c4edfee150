"""Masks in FlexAttention's form: `and_masks`, `or_masks`, `noop_mask`, `create_mask`, `create_block_mask`."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable

import numpy

from . import _fulgurite, _html
from ._arrays import integers, is_torch
from ._describe import mask_entries
from .capture import Combined, TracedMask, Tracer

Mask = Callable[[Any, Any, Any, Any], Any]
_FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def and_masks(*mask_mods: Mask) -> Mask:
    """A mask that keeps a key if all given masks keep it."""
    return _combined("and", mask_mods)


def or_masks(*mask_mods: Mask) -> Mask:
    """A mask that keeps a key if one of the given masks keeps it."""
    return _combined("or", mask_mods)


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """A mask that keeps every key."""
    return True


def _combined(op, mask_mods):
    if not mask_mods:
        raise ValueError(f"`{op}_masks` was given no mask, allowed: one or more")
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise ValueError(
                f"`{op}_masks` was given a {type(mask_mod).__name__}, allowed: (b, h, q_idx, kv_idx) -> bool"
            )
    return Combined(op, list(mask_mods))


class BlockMask:
    """For each block of queries, the blocks of keys that it may see.

    *Partial* blocks still apply `mask_mod` to each element, *full* blocks do not, and blocks in neither list are
    skipped. The fields have torch's names: `kv_num_blocks` and `kv_indices` for the partial blocks,
    `full_kv_num_blocks` and `full_kv_indices` for the full ones, int32 NumPy arrays.
    """

    def __init__(self, lists, block_size, seq_lengths, mask_mod, traced):
        self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices = lists
        self.BLOCK_SIZE, self.seq_lengths, self.mask_mod = block_size, seq_lengths, mask_mod
        self._traced = traced
        self._copies: dict[Any, list[Any]] = {}

    def _lists_for(self, rows):
        """The four lists, where kernels for `rows` read them: on its GPU, copied there once, or on the host."""
        lists = [getattr(self, name) for name in _FIELDS]
        if not is_torch(rows) or rows.device.type != "cuda":
            return lists
        import torch

        if torch.compiler.is_compiling():  # the operator copies them
            return lists
        copies = self._copies.get(rows.device)
        if copies is None:
            copies = [torch.from_numpy(array).to(rows.device) for array in lists]
            if type(copies[0]) is torch.Tensor:  # no tensor that lives in a trace only
                self._copies[rows.device] = copies
        return copies

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Mask | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A block mask of given lists: `[batch, heads, query blocks]` numbers of blocks, `[..., key blocks]` indices.

        Without full blocks, `mask_mod` is applied in every listed block; without `mask_mod`, listed blocks are seen
        completely. `compute_q_blocks` has no effect: gradients need no second list.
        """
        sizes = _block_size(BLOCK_SIZE)
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ValueError("`full_kv_num_blocks` and `full_kv_indices` belong together; give both or neither")
        counts, indices = _list("kv_num_blocks", kv_num_blocks, 3), _list("kv_indices", kv_indices, 4)
        full_counts, full_indices = counts * 0, indices * 0
        if full_kv_num_blocks is not None:
            full_counts = _list("full_kv_num_blocks", full_kv_num_blocks, 3)
            full_indices = _list("full_kv_indices", full_kv_indices, 4)
        lists = (counts, indices, full_counts, full_indices)
        for name, array, want in (
            ("kv_num_blocks", counts, indices.shape[:3]),
            ("full_kv_num_blocks", full_counts, indices.shape[:3]),
            ("full_kv_indices", full_indices, indices.shape),
        ):
            if array.shape != want:
                raise ValueError(f"`{name}` has shape {list(array.shape)}, allowed: {list(want)}, as `kv_indices`")
        for name, array, most in zip(_FIELDS, lists, (indices.shape[3], indices.shape[3] - 1) * 2):
            if array.size and not 0 <= array.min() <= array.max() <= max(most, 0):
                raise ValueError(f"`{name}` reaches from {array.min()} to {array.max()}, allowed: 0 to {most}")
        if seq_lengths is None:
            seq_lengths = (indices.shape[2] * sizes[0], indices.shape[3] * sizes[1])
        mask_mod = mask_mod or noop_mask
        tracer = Tracer()
        traced = TracedMask(tracer.mask("mask_mod", mask_mod), tracer)
        return cls(lists, sizes, tuple(seq_lengths), mask_mod, traced)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The lengths, the four lists, the block sizes and `mask_mod`; `flatten=False` keeps pairs together."""
        lengths, sizes = ((*self.seq_lengths,), (*self.BLOCK_SIZE,))
        lists = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)
        if flatten:
            return (*lengths, *lists, *sizes, self.mask_mod)
        return (lengths, *lists, sizes, self.mask_mod)

    def numel(self) -> int:
        """The number of scores: batch x heads x q_len x k_len."""
        return math.prod(self.shape)

    def to(self, device: Any) -> BlockMask:
        """This mask: its lists stay on the host, and the first call on a GPU copies them there."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, q_len, k_len); batch or heads is 1 if all share the lists."""
        return (*self.kv_num_blocks.shape[:2], *self.seq_lengths)

    def sparsity(self) -> float:
        """Percentage of blocks that are skipped."""
        listed = int(self.kv_num_blocks.sum()) + int(self.full_kv_num_blocks.sum())
        return 100.0 * (1.0 - listed / max(1, self.kv_indices.size))

    def to_dense(self) -> numpy.ndarray:
        """Booleans `[batch, heads, query blocks, key blocks]`, True for blocks that are computed."""
        dense = numpy.zeros(self.kv_indices.shape, bool)
        for counts, indices in (
            (self.kv_num_blocks, self.kv_indices),
            (self.full_kv_num_blocks, self.full_kv_indices),
        ):
            for at in numpy.ndindex(counts.shape):
                dense[(*at, indices[at][: counts[at]])] = True
        return dense

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%)"

    def _repr_html_(self) -> str:
        """The blocks of the first head of the first sequence: skipped, partial, full."""
        kinds = numpy.zeros(self.kv_indices.shape[2:], numpy.int8)
        lists = ((1, self.kv_num_blocks, self.kv_indices), (2, self.full_kv_num_blocks, self.full_kv_indices))
        for kind, counts, indices in lists if self.kv_indices.shape[0] and self.kv_indices.shape[1] else ():
            for row in range(kinds.shape[0]):
                kinds[row, indices[0, 0, row][: counts[0, 0, row]]] = kind
        more = "" if self.kv_indices.shape[:2] == (1, 1) else "; the first head of the first sequence is drawn"
        return _html.tiles(f"{self!r}, blocks of {self.BLOCK_SIZE[0]} x {self.BLOCK_SIZE[1]}{more}", kinds)


def _block_size(BLOCK_SIZE):
    """The rows and columns of a block."""
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) and len(BLOCK_SIZE) == 2 else (BLOCK_SIZE, BLOCK_SIZE)
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 1 <= size < 2**30:
            raise ValueError(f"`BLOCK_SIZE` is {BLOCK_SIZE!r}, allowed: integers of at least 1")
    return tuple(sizes)


def _check_sizes(B, H, Q_LEN, KV_LEN):
    sizes: list[tuple[str, Any, int]] = [("B", B, 1), ("H", H, 1), ("Q_LEN", Q_LEN, 0), ("KV_LEN", KV_LEN, 0)]
    for name, size, least in sizes:
        if size is None and least == 1:
            continue
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < least or size >= 2**30:
            raise ValueError(f"`{name}` is {size!r}, allowed: an integer of at least {least}")


def _list(name, values, axes):
    """A list of a block mask as int32 on the host; missing leading axes are 1."""
    values = integers(name, values.cpu() if is_torch(values) else values)
    array = numpy.asarray(values)
    if not axes - 2 <= array.ndim <= axes:
        raise ValueError(
            f"`{name}` has shape {list(array.shape)}, allowed: {axes} axes, or fewer without heads and batch"
        )
    return array.reshape((1,) * (axes - array.ndim) + array.shape)


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Any:
    """The booleans `[B, H, Q_LEN, KV_LEN]` of a `mask_mod`; for a `score_mod`, whether it leaves a score above -inf.

    The callable runs on arrays of indices, once. With `device` they are torch tensors there, otherwise NumPy arrays.
    """
    _check_sizes(B, H, Q_LEN, KV_LEN)
    if not callable(mod_fn):
        raise ValueError(f"`mod_fn` is a {type(mod_fn).__name__}, allowed: a mask_mod or a score_mod")
    shape = (B or 1, H or 1, Q_LEN, KV_LEN)
    if device is None:
        counting, zeros, inside = numpy.arange, numpy.zeros(shape, numpy.float32), numpy.broadcast_to
    else:
        import torch

        zeros, inside = torch.zeros(shape, device=device), torch.broadcast_to
        counting = lambda count: torch.arange(count, device=device)  # noqa: E731
    indices = [counting(size).reshape([-1 if at == axis else 1 for at in range(4)]) for axis, size in enumerate(shape)]
    scores = _arguments(mod_fn) == 5
    try:
        result = mod_fn(zeros, *indices) if scores else mod_fn(*indices)
    except TypeError as cause:
        hint = "; callables with functions of torch need `device`" if device is None else ""
        raise ValueError(f"`mod_fn` does not take arrays of indices: {cause}{hint}") from cause
    if scores:
        result = ~(result == -math.inf)
    if device is None:
        return inside(numpy.asarray(result).astype(bool), shape).copy()
    result = torch.as_tensor(result, device=device)
    return inside(result.bool(), shape).clone()


def _arguments(function):
    """How many positional arguments a callable has."""
    try:
        kinds = [each.kind for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    except (TypeError, ValueError):
        return 4
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def create_block_mask(
    mask_mod: Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks that `mask_mod` can reach, found by interval arithmetic without evaluating elements.

    B, H      None: all sequences or heads share the lists; the mask must not read that index
    device    accepted for compatibility with torch's signature; the lists stay on the host, and the first call on a
              GPU copies them there

    The arguments after `BLOCK_SIZE` tune torch's kernels and have no effect.
    """
    rows, cols = _block_size(BLOCK_SIZE)
    _check_sizes(B, H, Q_LEN, KV_LEN)
    tracer = Tracer()
    text = tracer.mask("mask_mod", mask_mod)
    for name, size, word in (("B", B, "b"), ("H", H, "h")):
        if size is None and word in text.split():
            raise ValueError(f"`{name}` is None and `mask_mod` reads that index, allowed: the number of them")
    captured = tracer.captured()
    shared = [B or 1, H or 1]
    partial, full = _fulgurite.block_lists(
        text,
        [*shared, Q_LEN, KV_LEN],
        [rows, cols],
        [name for name, _ in captured],
        # The lists are made on the host; calls read the arrays in place.
        [array.cpu() if is_torch(array) else array for _, array in captured],
    )
    shape = (*shared, -(-Q_LEN // rows), -(-KV_LEN // cols))
    lists = [array for each in (partial, full) for array in _lists(each, shape)]
    return BlockMask(lists, (rows, cols), (Q_LEN, KV_LEN), mask_mod, TracedMask(text, tracer))


def _lists(rows, shape):
    counts = numpy.array([len(row) for row in rows], numpy.int32).reshape(shape[:3])
    indices = numpy.zeros(shape, numpy.int32)
    if not indices.size:
        return counts, indices
    for row, blocks in zip(indices.reshape(-1, shape[3]), rows):
        row[: len(blocks)] = blocks
    return counts, indices


def block_lists(block_mask, extras, tracer, q):
    """Adds the lists of a block mask, ours or torch's, and its mask to a call whose queries are `q`."""
    if not all(hasattr(block_mask, name) for name in (*_FIELDS, "BLOCK_SIZE", "mask_mod")):
        raise ValueError(f"`block_mask` is a {type(block_mask).__name__}, allowed: what `create_block_mask` gives")
    rows, cols = block_mask.BLOCK_SIZE
    extras.entry(f"blocks {int(rows)} {int(cols)};")
    own = isinstance(block_mask, BlockMask)
    fields = block_mask._lists_for(q) if own else [getattr(block_mask, name) for name in _FIELDS]
    for name, lists in zip(_FIELDS, fields):
        if lists is not None:
            extras.add(name, integers(name, lists))
    if own:
        text = tracer.adopt(block_mask._traced)
    else:
        text = tracer.mask("block_mask", block_mask.mask_mod)
    extras.entry(mask_entries(text))
