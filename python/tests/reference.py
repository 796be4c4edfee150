"""Attention in NumPy and float64: the plainest code there is, used only to judge."""

import numpy as np


def visible(q_len, k_len, causal=False, window=None):
    """[q_len, k_len], True where query i may see key j."""
    i, j = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
    diagonal = i + k_len - q_len
    keep = np.ones((q_len, k_len), bool)
    if causal == "top-left":
        keep &= j <= i
    elif causal:
        keep &= j <= diagonal
    if window is not None:
        left, right = window
        keep &= j >= diagonal - left if left is not None else True
        keep &= j <= diagonal + right if right is not None else True
    return keep


def attention(q, k, v, causal=False, window=None, scale=None, softcap=None, sinks=None, alibi_slopes=None):
    """o [batch, q_len, heads, dim] and lse [batch, heads, q_len], both float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, q_len, heads, dim), (_, k_len, kv_heads, _) = q.shape, k.shape
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = np.abs(np.arange(q_len)[:, None] + k_len - q_len - np.arange(k_len)[None, :])
        scores = scores - np.asarray(alibi_slopes, np.float64)[None, :, None, None] * distance
    scores = np.where(visible(q_len, k_len, causal, window), scores, -np.inf)
    columns = scores
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None, None], (batch, heads, q_len, 1))
        columns = np.concatenate([scores, sink], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = columns.max(axis=-1, initial=-np.inf, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        lse = np.log(np.exp(columns - top).sum(axis=-1, keepdims=True)) + top
        p = np.where(np.isneginf(scores), 0.0, np.exp(scores - np.where(np.isfinite(lse), lse, 0.0)))
    return np.einsum("bhij,bjhd->bihd", p, v), lse[..., 0]


def gradients(d_o, q, k, v, step=1e-5, **options):
    """(d_q, d_k, d_v) by central differences of sum(o * d_o): slow, and independent of any formula."""
    arrays = [np.array(x, np.float64) for x in (q, k, v)]
    results = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            value, ends = array[index], []
            for sign in (1, -1):
                array[index] = value + sign * step
                ends.append((attention(*arrays, **options)[0] * d_o).sum())
            array[index] = value
            gradient[index] = (ends[0] - ends[1]) / (2 * step)
        results.append(gradient)
    return results


def flex_attention(q, k, v, score_mod=None, mask_mod=None):
    """(o, lse) by calling the modifiers on whole index arrays; layout as above."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (heads, dim), kv_heads = q.shape[2:], k.shape[2]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * dim**-0.5
    at = np.meshgrid(*(np.arange(n) for n in scores.shape), indexing="ij")
    scores = scores if score_mod is None else np.asarray(score_mod(scores, *at), np.float64)
    if mask_mod is not None:
        scores = np.where(np.broadcast_to(mask_mod(*at), scores.shape), scores, -np.inf)
    with np.errstate(divide="ignore"):
        top = scores.max(axis=-1, initial=-np.inf, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        lse = np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)) + top
        p = np.where(np.isneginf(scores), 0.0, np.exp(scores - np.where(np.isfinite(lse), lse, 0.0)))
    return np.einsum("bhij,bjhd->bihd", p, v), lse[..., 0]


def flex_gradients(d_o, inputs, captures, step=1e-5, **options):
    """Gradients of q, k, v and captured float64 arrays by central differences; arrays are changed in place and back."""
    arrays = [np.array(x, np.float64) for x in inputs] + captures
    results = []
    for array in arrays:
        gradient = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            value, ends = array[index], []
            for sign in (1, -1):
                array[index] = value + sign * step
                ends.append((flex_attention(*arrays[:3], **options)[0] * d_o).sum())
            array[index] = value
            gradient[index] = (ends[0] - ends[1]) / (2 * step)
        results.append(gradient)
    return results
