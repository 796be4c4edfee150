"""The work of `flash_attn_with_kvcache` around its attention: lengths, indices, rotary embedding, writing of keys.

Every function works on NumPy arrays and torch tensors. Numbers on a GPU are never read back: there, an index that is
out of range is clamped, so that no read and no write leaves its array. Elsewhere such a number is an error.
"""

from __future__ import annotations

import numpy

from ._arrays import integers, is_torch, kind_of, shape_of


def on_gpu(array) -> bool:
    """Whether the array is a torch tensor whose numbers are not read back."""
    return is_torch(array) and array.device.type != "cpu"


def counting(count, like):
    """0, 1, ... as int64, in the library and on the device of `like`."""
    if is_torch(like):
        import torch

        return torch.arange(count, device=like.device)
    return numpy.arange(count)


def per_sequence(name, values, like, batch, most):
    """One number from 0 to `most` for each sequence, as int32 in the library and on the device of `like`."""
    if on_gpu(like) and on_gpu(values):
        import torch

        if values.is_floating_point() or values.dtype == torch.bool or values.numel() not in (1, batch):
            raise ValueError(f"`{name}` is {values.dtype} of {values.numel()}, allowed: {batch} integers")
        return values.to(device=like.device, dtype=torch.int32).reshape(-1).expand(batch).contiguous()
    numbers = _numbers(name, values, batch, most)
    if is_torch(like):
        import torch

        if len(set(numbers)) == 1:  # no copy to a GPU, which a recorded graph could not hold
            return torch.full((batch,), numbers[0], dtype=torch.int32, device=like.device)
        return torch.tensor(numbers, dtype=torch.int32, device=like.device)
    return numpy.array(numbers, numpy.int32)


def _numbers(name, values, batch, most):
    """One Python integer for each sequence; None means `most`."""
    if values is None:
        return [most] * batch
    given = values.tolist() if hasattr(values, "tolist") else values
    given = [given] * batch if type(given) is int else given
    if not isinstance(given, list) or len(given) != batch or any(type(n) is not int for n in given):
        raise ValueError(f"`{name}` is {values!r}, allowed: an integer, or {batch} of them")
    for at, number in enumerate(given):
        if not 0 <= number <= most:
            raise ValueError(f"`{name}`[{at}] is {number}, allowed: 0 to {most}")
    return given


def offsets(name, cu_seqlens, like, total):
    """Cumulative offsets of packed rows, int32 in the library of `like`; None if there are none."""
    if cu_seqlens is None:
        return None
    found = integers(name, cu_seqlens)
    if len(found.shape) != 1 or not found.shape[0]:
        raise ValueError(f"`{name}` has shape {list(found.shape)}, allowed: [batch + 1]")
    if is_torch(like) and not is_torch(found):
        import torch

        found = torch.from_numpy(found).to(like.device)
    if not on_gpu(like):
        steps = found.tolist()
        if steps[0] != 0 or steps[-1] != total or any(a > b for a, b in zip(steps, steps[1:])):
            raise ValueError(f"`{name}` is {steps}, allowed: rising offsets from 0 to {total}")
    return found


class Rows:
    """Which sequence each row of queries or of new keys belongs to, and its place among the rows of that sequence.

    `cu_seqlens` is None for rows `[batch, length]`; otherwise they are packed, `[length]`.
    """

    def __init__(self, cu_seqlens, batch, length, like):
        counted = counting(length, like)
        if cu_seqlens is None:
            self.sequence, self.place = counting(batch, like)[:, None], counted[None]
            self.lengths = length
            return
        ends = _as(counted, cu_seqlens[1:])
        if is_torch(like):
            import torch

            self.sequence = torch.searchsorted(ends, counted, side="right").clip(0, max(batch - 1, 0))
        else:
            self.sequence = numpy.searchsorted(ends, counted, side="right")
        self.place = counted - cu_seqlens[self.sequence]
        self.lengths = cu_seqlens[1:] - cu_seqlens[:-1]


def check_rotary(rotary_cos, rotary_sin, like, head_dim, most, known):
    """Checks the tables of the rotary embedding. `most` is the highest position; `known` says that it was read."""
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("`rotary_cos` and `rotary_sin` belong together; give both or neither")
    shape = shape_of("rotary_cos", rotary_cos, "[positions, rotary_dim / 2]")
    if len(shape) != 2 or 2 * shape[1] > head_dim:
        raise ValueError(f"`rotary_cos` has shape {list(shape)}, allowed: [positions, at most {head_dim // 2}]")
    if shape_of("rotary_sin", rotary_sin, "[positions, rotary_dim / 2]") != shape:
        raise ValueError(f"`rotary_sin` has shape {list(rotary_sin.shape)}, allowed: {list(shape)}, as `rotary_cos`")
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if kind_of(table) != "float" or is_torch(table) != is_torch(like):
            raise ValueError(f"`{name}` is {type(table).__name__} of {table.dtype}, allowed: floats, as `q`")
        if is_torch(table) and table.device != like.device:
            raise ValueError(f"`{name}` is on {table.device}, `q` on {like.device}, allowed: one device")
    if most >= shape[0]:
        reach = f"the highest position is {most}" if known else f"positions may reach {most}"
        raise ValueError(f"`rotary_cos` has {shape[0]} positions, allowed: at least {most + 1}; {reach}")


def rotate(x, positions, rotary_cos, rotary_sin, interleaved):
    """A copy of x `[..., heads, head_dim]` with its first `rotary_dim` elements rotated, computed in float32."""
    at = positions.clip(0, rotary_cos.shape[0] - 1)
    cos, sin = (_f32(table[at])[..., None, :] for table in (rotary_cos, rotary_sin))
    half = rotary_cos.shape[1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = _f32(x[..., first]), _f32(x[..., second])
    turned = x.clone() if is_torch(x) else x.copy()
    turned[..., first] = _as(x, a * cos - b * sin)
    turned[..., second] = _as(x, b * cos + a * sin)
    return turned


def _f32(x):
    return x.float() if is_torch(x) else x.astype(numpy.float32)


def _as(x, values):
    return values.to(x.dtype) if is_torch(x) else values.astype(x.dtype)


def sizes(k_cache, v_cache, sequences):
    """The number of sequences of the caches and the number of keys of each; `sequences` is "batch" if any will do."""
    room = "room"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        allowed = f"[{sequences}, {room}, heads, head_dim]"
        shape = shape_of(name, cache, allowed)
        if len(shape) != 4 or sequences not in ("batch", shape[0]) or room not in ("room", shape[1]):
            raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {allowed}")
        sequences, room = shape[:2]
    return sequences, room


def fresh_rows(k_cache, v_cache, k, v, cu_seqlens, batch, like) -> Rows:
    """The rows of the new keys, after checks that they fit the caches."""
    shape = shape_of("k", k, "[batch, new, heads, head_dim]")
    cu_seqlens = offsets("cu_seqlens_k_new", cu_seqlens, like, shape[0] if shape else 0)
    if cu_seqlens is not None and cu_seqlens.shape[0] != batch + 1:
        raise ValueError(f"`cu_seqlens_k_new` has {cu_seqlens.shape[0]} offsets, allowed: {batch + 1}")
    leading = [batch, *(shape[1:2] or ("new",))] if cu_seqlens is None else [*(shape[:1] or ("total",))]
    _check_fresh(k_cache, v_cache, k, v, leading)
    if k_cache.shape[0] < batch:
        raise ValueError(
            f"`k_cache` has {k_cache.shape[0]} sequences, `q` {batch}, allowed with `k` and `v`: as many or more"
        )
    return Rows(cu_seqlens, batch, leading[-1], like)


def _check_fresh(k_cache, v_cache, k, v, leading):
    """Checks that the new k and v, whose first axes are `leading`, fit the caches."""
    for name, fresh, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = [*leading, *cache.shape[2:]]
        if list(shape_of(name, fresh, "[batch, new, heads, head_dim]")) != want:
            raise ValueError(f"`{name}` has shape {list(fresh.shape)}, allowed: {want}")
        if is_torch(cache) != is_torch(fresh) or cache.dtype != fresh.dtype:
            raise ValueError(f"`{name}` is {fresh.dtype}, allowed: {cache.dtype}, as its cache is")
        if is_torch(cache) and cache.device != fresh.device:
            raise ValueError(f"`{name}` is on {fresh.device}, its cache on {cache.device}, allowed: one device")
        if not is_torch(cache) and not isinstance(cache, numpy.ndarray):
            raise ValueError(f"`{name}_cache` is a {type(cache).__name__}, allowed: an array that can be written")
        if isinstance(cache, numpy.ndarray) and not cache.flags.writeable:
            raise ValueError(f"`{name}_cache` is read-only, allowed: an array that can be written")


def check_room(used, new, room, cache_rows):
    """Checks that the new keys fit, and that no two sequences write to the same cache."""
    added = new.tolist() if hasattr(new, "tolist") else [new] * len(used)
    for at, (length, more) in enumerate(zip(used.tolist(), added)):
        if length + more > room:
            raise ValueError(f"`cache_seqlens`[{at}] is {length}, {more} new keys do not fit a room of {room}")
    if cache_rows is not None and len(set(cache_rows.tolist())) < len(added):
        raise ValueError(f"`cache_batch_idx` is {cache_rows.tolist()}, allowed with `k` and `v`: each index once")


def append(cache, fresh, cache_rows, rows, positions):
    """Writes new keys to their positions."""
    sequence = rows.sequence if cache_rows is None else cache_rows[rows.sequence]
    at = positions.clip(0, max(cache.shape[1] - 1, 0))
    if is_torch(cache):
        import torch

        with torch.no_grad():
            cache[sequence.clip(0, cache.shape[0] - 1).long(), at.long()] = fresh
        return
    cache[sequence, at] = fresh


def selected(cache, cache_rows, longest):
    """The sequences of a cache that a call reads. On the CPU, indices at equal distances give a view; other indices
    copy the first `longest` keys. On a GPU, indices are not read back, and the sequences are copied."""
    if on_gpu(cache):
        return cache.index_select(0, cache_rows.clip(0, cache.shape[0] - 1))
    indices = cache_rows.tolist()
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if indices and step > 0 and indices == list(range(indices[0], indices[0] + step * len(indices), step)):
        return cache[indices[0] : indices[-1] + 1 : step]
    return cache[:, :longest][cache_rows.long() if is_torch(cache_rows) else cache_rows]
