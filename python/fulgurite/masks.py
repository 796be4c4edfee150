"""Masks in FlexAttention's form: `and_masks`, `or_masks`, `create_block_mask`."""

from __future__ import annotations

from typing import Any, Callable

import numpy

from . import _fulgurite
from ._arrays import integers, is_torch
from ._describe import mask_entries
from .capture import Combined, TracedMask, Tracer

Mask = Callable[[Any, Any, Any, Any], Any]


def and_masks(*mask_mods: Mask) -> Mask:
    """A mask that keeps a key if all given masks keep it."""
    return _combined("and", mask_mods)


def or_masks(*mask_mods: Mask) -> Mask:
    """A mask that keeps a key if one of the given masks keeps it."""
    return _combined("or", mask_mods)


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

    @property
    def shape(self) -> tuple:
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


def create_block_mask(
    mask_mod: Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The blocks that `mask_mod` can reach, found by interval arithmetic without evaluating elements.

    B, H      None: all sequences or heads share the lists; the mask must not read that index
    device    accepted for compatibility with torch's signature; the lists are small and stay on the host
    """
    rows, cols = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    sizes: list[tuple[str, Any, int]] = [("B", B, 1), ("H", H, 1), ("Q_LEN", Q_LEN, 0), ("KV_LEN", KV_LEN, 0)]
    for name, size, least in sizes:
        if size is None and least == 1:
            continue
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < least or size >= 2**30:
            raise ValueError(f"`{name}` is {size!r}, allowed: an integer of at least {least}")
    for size in (rows, cols):
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 1 <= size < 2**30:
            raise ValueError(f"`BLOCK_SIZE` is {BLOCK_SIZE!r}, allowed: integers of at least 1")
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


def block_lists(block_mask, extras, tracer):
    """Adds the lists of a block mask, ours or torch's, and its mask to a call."""
    fields = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    if not all(hasattr(block_mask, name) for name in (*fields, "BLOCK_SIZE", "mask_mod")):
        raise ValueError(f"`block_mask` is a {type(block_mask).__name__}, allowed: what `create_block_mask` gives")
    rows, cols = block_mask.BLOCK_SIZE
    extras.entry(f"blocks {int(rows)} {int(cols)};")
    for name in fields:
        lists = getattr(block_mask, name)
        if lists is not None:
            extras.add(name, integers(name, lists))
    if isinstance(block_mask, BlockMask):
        text = tracer.adopt(block_mask._traced)
    else:
        text = tracer.mask("block_mask", block_mask.mask_mod)
    extras.entry(mask_entries(text))
