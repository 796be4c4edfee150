"""Wrong calls, at random: every one is an exception, none a crash. `FULGURITE_LONG=1` makes a thousand of them."""

import os
import random

import numpy as np
import pytest

import fulgurite

COUNT = 1000 if os.environ.get("FULGURITE_LONG") == "1" else 100

try:
    import torch
except ImportError:
    torch = None


def valid(rng):
    """q, k, v and options that make a call."""
    batch, q_len, k_len, kv, dim = (rng.randint(1, n) for n in (3, 9, 9, 3, 24))
    heads = kv * rng.randint(1, 3)
    make = np.random.default_rng(rng.randrange(2**32)).standard_normal
    q, k, v = (
        make(shape).astype(np.float32)
        for shape in ((batch, q_len, heads, dim), (batch, k_len, kv, dim), (batch, k_len, kv, dim))
    )
    return [q, k, v], {}


# Each takes the arrays and options of a call that is right, and makes it wrong.
def another_type(rng, arrays, options):
    at = rng.randrange(3)
    dtype = rng.choice(["float64", "int32", "int8", "uint16", "bool", "complex64", ">f4", "float16", "object", "S4"])
    arrays[at] = arrays[at].astype(dtype)


def another_rank(rng, arrays, options):
    at = rng.randrange(3)
    arrays[at] = rng.choice(
        [
            arrays[at][0],
            arrays[at][None],
            arrays[at].ravel(),
            arrays[at][0, 0, 0, 0],
            arrays[at].reshape((1,) * 9 + (-1,)),
        ]
    )


def another_shape(rng, arrays, options):
    at, axis = rng.choice([(1, 0), (2, 0), (1, 3), (2, 1), (2, 2)])
    arrays[at] = np.concatenate([arrays[at]] * 5, axis=axis)


def reversed_axis(rng, arrays, options):
    at = rng.randrange(3)
    arrays[at] = np.concatenate([arrays[at]] * 2, axis=3)[..., ::-1][..., : arrays[at].shape[3]]
    arrays[at] = np.concatenate([arrays[at]] * 2, axis=3)[..., ::-1]


def gaps(rng, arrays, options):
    arrays[:] = [np.repeat(np.concatenate([x] * 2, axis=3), 2, axis=3)[..., ::2] for x in arrays]


def odd_bytes(rng, arrays, options):
    x = arrays[0]
    arrays[0] = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)


def no_array(rng, arrays, options):
    junk = [None, 1, 1.5, "q", [1.0], {}, object(), b"", np.float32(1), arrays, range(3), type, np.ndarray]
    arrays[rng.randrange(3)] = rng.choice(junk)


def no_heads(rng, arrays, options):
    at = rng.randrange(3)
    arrays[at] = arrays[at][:, :, :0]


def wide_heads(rng, arrays, options):
    arrays[:] = [np.zeros((*x.shape[:3], 513), np.float32) for x in arrays]


def bad_number(rng, arrays, options):
    name = rng.choice(["scale", "softcap", "tau", "threads"])
    bad = [-1, float("nan"), float("inf"), "x", [], type, -(2**70), 10**400, {}]
    options[name] = rng.choice(bad if name == "tau" else [0, *bad])


def bad_name(rng, arrays, options):
    name = rng.choice(["exp", "engine", "rescale"])
    options[name] = rng.choice(
        ["", "x", 5, b"cpu", "cpu:", "cpu;", "poly:99", "lazy:", "a b", ["cpu"], "\0", "é", "cpu\n"]
    )


def bad_causal(rng, arrays, options):
    options["causal"] = rng.choice(["left", 2, [], arrays[0], {}, 1.5, b"top-left"])


def bad_window(rng, arrays, options):
    options["window"] = rng.choice([3, (1,), (1, 2, 3), ("a", 1), (1.5, 2), "ab", (None, {}), arrays[0], (2**70, 1)])


def bad_sinks(rng, arrays, options):
    heads = arrays[0].shape[2]
    name = rng.choice(["sinks", "alibi_slopes"])
    options[name] = rng.choice(
        [
            np.zeros(heads + 1, np.float32),
            np.zeros(heads),
            np.zeros((heads, 1, 1), np.float32),
            1.0,
            np.zeros(heads, bool),
        ]
    )


def bad_offsets(rng, arrays, options):
    total = arrays[0].shape[1]
    arrays[:] = [x[0] for x in arrays]
    good = [0, min(x.shape[0] for x in arrays)]
    bad = rng.choice(
        [
            [1, total],
            [0, total + 1],
            [0, 3, 1, total],
            [],
            [0.5, 1.0],
            None,
            7,
            [[0, total]],
            [0, -5],
            ["a"],
            [0, 2**40],
            {},
        ]
    )
    options["cu_seqlens"] = rng.choice([(bad, good), (good, bad), (bad, bad), [bad], good[0]])
    if options["cu_seqlens"] == (None, None):
        options["cu_seqlens"] = (None, good)


def bad_used(rng, arrays, options):
    batch, q_len = arrays[0].shape[:2]
    options["used_lengths"] = rng.choice(
        [([q_len + 1] * batch, None), ([-1] * batch, None), ([1] * (batch + 1), None), 5, "a"]
    )


def bad_out(rng, arrays, options):
    q = arrays[0]
    frozen = np.zeros(q.shape, np.float32)
    frozen.flags.writeable = False
    options["out"] = rng.choice(
        [
            q,
            frozen,
            np.zeros(q.shape),
            np.zeros((*q.shape[:3], q.shape[3] + 1), np.float32),
            [1],
            np.zeros(3, np.float32),
        ]
    )


def bad_mask(rng, arrays, options):
    options[rng.choice(["mask", "bias"])] = rng.choice(
        [np.zeros((50, 50), bool), np.zeros((11, 11)), [True], 1, np.zeros((1,) * 5, bool), np.zeros(4, complex), "a"]
    )


def bad_modifier(rng, arrays, options):
    table = np.zeros(1, np.float32)
    name = rng.choice(["score_mod", "mask_mod"])
    options[name] = rng.choice(
        [
            5,
            lambda: 1,
            lambda *a: None,
            lambda *a: a,
            lambda *a: np.sin(a[0]),
            lambda *a: table[a[-1] + 5],
            lambda *a: a[-1] and a[-2],
            lambda *a: table,
            lambda *a: 1 / 0,
            np.sin,
            print,
            lambda *a: [][a[0]],
            lambda *a: "x",
        ]
    )


def bad_blocks(rng, arrays, options):
    other = fulgurite.create_block_mask(lambda b, h, q, k: q >= k, None, None, 400, 400)
    broken = fulgurite.create_block_mask(lambda b, h, q, k: q >= k, None, None, *(x.shape[1] for x in arrays[:2]))
    broken.kv_num_blocks[:] = broken.full_kv_num_blocks[:] = 2**31 - 1
    broken.kv_indices[:] = rng.choice([-1, 2**31 - 1])
    options["block_mask"] = rng.choice([other, broken, 1, lambda b, h, q, k: q])


def unknown(rng, arrays, options):
    options[rng.choice(["dropout", "is_causal", "attn_mask", "q"])] = 1


MISTAKES = [
    another_type, another_rank, another_shape, reversed_axis, gaps, odd_bytes, no_array, no_heads, wide_heads, bad_number,
    bad_name, bad_causal, bad_window, bad_sinks, bad_offsets, bad_used, bad_out, bad_mask, bad_modifier, bad_blocks, unknown,
]  # fmt: skip


def as_torch(rng, arrays, options):
    """Some of the arrays as tensors, where torch has such."""
    for at, x in enumerate(arrays):
        if isinstance(x, np.ndarray) and (x.dtype in (np.float32, np.float16, np.float64, np.int32)):
            try:
                arrays[at] = torch.from_numpy(x)
            except (ValueError, TypeError):
                continue
            kind = rng.randrange(4)
            if kind == 0:
                arrays[at] = arrays[at].to("meta")
            elif kind == 1 and arrays[at].is_floating_point():
                arrays[at].requires_grad_()


def test_right_calls_are_right():
    """The calls that mistakes are made in do work, so that it is the mistake that is refused."""
    for seed in range(20):
        arrays, options = valid(random.Random(seed))
        fulgurite.attention(*arrays, **options)


@pytest.mark.filterwarnings("ignore")
def test_wrong_calls_raise():
    seen = set()
    for seed in range(COUNT):
        rng = random.Random(seed)
        arrays, options = valid(rng)
        mistake = MISTAKES[seed % len(MISTAKES)]
        mistake(rng, arrays, options)
        if torch is not None and rng.random() < 0.5:
            as_torch(rng, arrays, options)
        try:
            fulgurite.attention(*arrays, **options)
        except Exception as error:
            # A panic of ours would be a BaseException and pass through.
            assert str(error), f"seed {seed}: {mistake.__name__} gives an empty {type(error).__name__}"
            seen.add(type(error))
        else:
            pytest.fail(f"seed {seed}: {mistake.__name__} was accepted")
    assert ValueError in seen
