"""Attention over ranks: 2 and 4 gloo processes against one process, by the tolerance rule.

A case runs on a pool of processes. The parent collects the rows of all ranks and judges them beside the f64 oracle, as
it judges the results of one process. `FULGURITE_LONG=1` runs all cases on all numbers of ranks.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="fulgurite.distributed is for torch tensors")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import Pool  # noqa: E402  (after the skip)

import fulgurite  # noqa: E402
from fulgurite import _api, _dispatch  # noqa: E402
from fulgurite import distributed as fd  # noqa: E402
from fulgurite.distributed._layout import Mask, blocks, hops  # noqa: E402

LONG = os.environ.get("FULGURITE_LONG") == "1"


def inputs(case):
    """q, k, v, d_o of the whole sequence, and the extra tensors; the same in every process."""
    if "rows" in case:  # given
        return case["rows"], {}
    make = torch.Generator().manual_seed(case.get("seed", 3))
    length, (heads, kv_heads, dim, v_dim) = case["length"], case.get("sizes", (4, 4, 16, 16))
    lead = () if "documents" in case else (case.get("batch", 2),)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)]
    rows = [torch.randn((*lead, length, *each), generator=make).to(case.get("dtype", torch.float32)) for each in shapes]
    extras = {name: torch.randn(heads, generator=make) for name in ("sinks", "alibi_slopes") if case.get(name)}
    if "alibi_slopes" in extras:
        extras["alibi_slopes"] = extras["alibi_slopes"].abs() * 0.1
    if "documents" in case:
        extras["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(case["documents"])], dtype=torch.int32)
    return rows, extras


def mask_of(case):
    return {name: case[name] for name in ("causal", "window", "softcap", "scale") if name in case}


def layout_of(case, count, extras):
    mask = {name: case[name] for name in ("causal", "window") if name in case}
    return fd.sequence_layout(
        case["length"], count, balance=case.get("balance", "zigzag"), cu_seqlens=extras.get("cu_seqlens"), **mask
    )


def mesh_of(count, strategy):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(count).view(2, count // 2)) if strategy == "2d" else None


def attend(group, rank, count, case):
    """One rank of a case: its rows of o, lse and the gradients, and the gradient of the sinks."""
    (q, k, v, d_o), extras = inputs(case)
    layout, dim = layout_of(case, count, extras), q.ndim - 3
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank, dim) for x in (q, k, v, d_o))
    # Padding may hold anything.
    padding = torch.from_numpy(layout.positions(rank)) >= layout.length
    for x in (q, k, v, d_o):
        x.movedim(dim, 0)[padding] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v, *([extras["sinks"]] if "sinks" in extras else []))]
    mesh = mesh_of(count, case.get("strategy"))
    more = {"mesh": mesh} if mesh is not None else {"group": group, "strategy": case.get("strategy", "ring")}
    o, lse = fd.context_parallel_attention(
        q, k, v, length=layout.length, balance=layout, return_lse=True, threads=1, **mask_of(case), **extras, **more
    )
    if case.get("d_lse"):
        d_lse = torch.where(torch.isinf(lse), 0.0, torch.sin(lse.detach()))
        found = torch.autograd.grad((o, lse), leaves, (d_o, d_lse))
    else:
        found = torch.autograd.grad(o, leaves, d_o)
    return [x.detach().float() for x in (o, lse, *found)]


def whole(parts, layout, dim):
    """The rows of all ranks in the order of the sequence; padding must be 0, or -inf in an LSE."""
    shape = list(parts[0].shape)
    shape[dim] = layout.length
    made = torch.full(shape, math.nan)
    for rank, part in enumerate(parts):
        positions = torch.from_numpy(layout.positions(rank))
        keep = positions < layout.length
        made.movedim(dim, 0)[positions[keep]] = part.movedim(dim, 0)[keep]
        padding = part.movedim(dim, 0)[~keep]
        assert ((padding == 0) | (padding == -math.inf)).all()
    return made


def judge(case, results, layout, note=""):
    """Judges the results of all ranks beside the oracle, by the tolerance rule."""
    (q, k, v, d_o), extras = inputs(case)
    dim, dtype = q.ndim - 3, q.dtype
    o, d_q, d_k, d_v = (whole([r[at] for r in results], layout, dim).to(dtype) for at in (0, 2, 3, 4))
    lse = whole([r[1] for r in results], layout, q.ndim - 2)
    gradients = [d_q, d_k, d_v]
    if "sinks" in extras:
        gradients.append(sum(r[5] for r in results))
    more = {name: value for name, value in extras.items() if name != "cu_seqlens"}
    if "cu_seqlens" in extras:
        more["cu_seqlens"] = (extras["cu_seqlens"],) * 2
    text, tensors = _api._described(q, k, v, **mask_of(case), **more)
    description = _dispatch.description(text)
    d_lse = torch.where(torch.isinf(lse), 0.0, torch.sin(lse)) if case.get("d_lse") else None
    judged = description.judge(q, k, v, tensors, [o, lse])
    judged += description.judge(q, k, v, tensors, gradients, (o, lse, d_o, d_lse))
    assert {each.name for each in judged} >= {"o", "lse", "d_q", "d_k", "d_v"}
    assert not [f"{note} {each.name}: {each.text}" for each in judged if not each.ok]


CASES = {
    "causal": dict(length=64, causal=True),
    "full": dict(length=48),
    "odd length": dict(length=61, causal=True),
    "shorter than its chunks": dict(length=5, causal=True),
    "grouped heads": dict(length=50, causal=True, sizes=(8, 2, 16, 24)),
    "contiguous": dict(length=37, causal=True, balance="contiguous"),
    "by work": dict(length=70, causal=True, window=(9, None), balance="work"),
    "window": dict(length=67, window=(11, 4)),
    "window that skips the diagonal": dict(length=40, window=(20, -3), balance="contiguous"),
    "short window": dict(length=64, causal=True, window=(5, 0), balance="contiguous"),
    "documents": dict(length=63, documents=(1, 17, 0, 30, 15), causal=True),
    "documents, both sides, by work": dict(length=45, documents=(40, 3, 2), balance="work", sizes=(4, 2, 16, 16)),
    "documents in a window": dict(length=63, documents=(29, 34), window=(7, 2), balance="contiguous"),
    "one document each": dict(length=32, documents=(8, 8, 8, 8), causal=True, balance="contiguous"),
    "bf16": dict(length=61, causal=True, dtype=torch.bfloat16),
    "f16, grouped": dict(length=33, causal=True, dtype=torch.float16, sizes=(8, 2, 32, 32)),
    "sinks, gradient of LSE": dict(length=30, causal=True, sinks=True, d_lse=True),
    "slopes, softcap, scale": dict(length=43, causal=True, alibi_slopes=True, softcap=3.0, scale=0.3),
    "slopes and documents": dict(length=43, alibi_slopes=True, documents=(20, 23)),
}
# On each number of ranks, every case runs with one strategy; the long run does all of them.
STRATEGIES = {2: ("ring", "ulysses"), 4: ("ring", "ulysses", "2d")}
ALL = [(name, count, strategy) for count in STRATEGIES for name in CASES for strategy in STRATEGIES[count]]
SOME = [
    (name, count, strategy)
    for at, (name, count, strategy) in enumerate(ALL)
    if (strategy, count) == ("ring", 4) or at % 3 == 0
]


@pytest.mark.parametrize("name,count,strategy", ALL if LONG else SOME)
def test_against_the_oracle(pool, name, count, strategy):
    case = {**CASES[name], "strategy": strategy}
    layout = layout_of(case, count, inputs(case)[1])
    found = pool.run(attend, count, case)
    judge(case, found, layout, f"{name} on {count}")


# Numbers of ranks, heads and rows that divide nothing.
ODD = {
    "28 and 4 heads": dict(length=61, causal=True, sizes=(28, 4, 16, 16)),
    "28 and 4 heads, bf16": dict(length=50, causal=True, sizes=(28, 4, 24, 8), dtype=torch.bfloat16),
    "documents by work": dict(length=47, documents=(1, 0, 29, 17), causal=True, balance="work", sizes=(6, 3, 16, 16)),
    "fewer rows than ranks": dict(length=2, causal=True, sizes=(6, 2, 16, 16)),
    "window": dict(length=53, window=(9, 1), balance="contiguous", sizes=(6, 6, 8, 12), dtype=torch.float16),
}


@pytest.mark.parametrize("name", ODD)
def test_three_ranks_against_the_oracle(pool, name):
    case = ODD[name]
    strategies = ("ring", "ulysses") if case["sizes"][0] % 3 == 0 else ("ring",)
    for strategy in strategies:
        found = pool.run(attend, 3, {**case, "strategy": strategy})
        judge(case, found, layout_of(case, 3, inputs(case)[1]), f"{name}, {strategy}")


def test_a_planted_error_is_found(pool):
    case = CASES["odd length"]
    found = pool.run(attend, 2, case)
    layout = layout_of(case, 2, {})
    judge(case, found, layout)
    for other in ({"causal": False}, {"scale": 0.2501}):
        with pytest.raises(AssertionError, match="o: WRONG"):
            judge({**case, **other}, found, layout)
    for at, name in ((2, "d_q"), (3, "d_k"), (4, "d_v")):
        planted = [list(each) for each in found]
        planted[1][at] = planted[1][at] * 1.01
        with pytest.raises(AssertionError, match=f"{name}: WRONG"):
            judge(case, planted, layout)


def measured(group, rank, count, case):
    """The bytes of a rank as `traffic` counts them, as the closed form has them, and as torch.distributed gets them."""
    import torch.distributed as dist

    (q, k, v, d_o), extras = inputs(case)
    layout, dim = layout_of(case, count, extras), q.ndim - 3
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank, dim).requires_grad_() for x in (q, k, v, d_o))
    mask = {name: case[name] for name in ("causal", "window") if name in case}
    handed = {"peers": 0, "exchange": 0}

    def point(operation, tensor, *more):
        handed["peers"] += tensor.numel() * tensor.element_size() * (operation is dist.isend)
        return p2p(operation, tensor, *more)

    def exchange(found, tensor, group, **more):
        ranks = dist.get_world_size(group)
        handed["exchange"] += tensor.numel() * tensor.element_size() * (ranks - 1) // ranks
        return all_to_all(found, tensor, group=group, **more)

    p2p, all_to_all = dist.P2POp, dist.all_to_all_single
    dist.P2POp, dist.all_to_all_single = point, exchange
    mesh = mesh_of(count, case["strategy"])
    more = {"mesh": mesh} if mesh is not None else {"group": group, "strategy": case["strategy"]}
    try:
        with fd.traffic() as sent:
            o = fd.context_parallel_attention(q, k, v, balance=layout, threads=1, **mask, **extras, **more)
            o.backward(d_o)
    finally:
        dist.P2POp, dist.all_to_all_single = p2p, all_to_all
    extras.pop("sinks", None)
    closed = fd.bytes_sent(q, k, v, layout=layout, backward=True, **_sides(count, case), **mask, **extras)
    return sent, closed, handed


def _sides(count, case):
    strategy = case["strategy"]
    return {"ring": {"ring": count}, "ulysses": {"ulysses": count}, "2d": {"ring": 2, "ulysses": count // 2}}[strategy]


@pytest.mark.parametrize("count,strategy", [(2, "ring"), (4, "ring"), (2, "ulysses"), (4, "ulysses"), (4, "2d")])
def test_bytes_sent_are_those_of_the_closed_form(pool, count, strategy):
    for name in ("grouped heads", "bf16", "short window", "documents"):
        found = pool.run(measured, count, {**CASES[name], "strategy": strategy})
        for sent, closed, handed in found:
            assert {kind: sent[kind] for kind in closed} == closed
            assert handed == {"peers": closed["keys"] + closed["gradients"], "exchange": closed["heads"]}
    # By hand: 60 rows of 4 ranks, 2 key heads of 16 + 24 elements, f32, three times forward and three times backward.
    if (count, strategy) == (4, "ring"):
        case = {**CASES["grouped heads"], "length": 240, "strategy": "ring", "batch": 1}
        sent = pool.run(measured, 4, case)[0][0]
        assert sent["keys"] == 2 * 3 * 60 * 2 * 40 * 4 and sent["gradients"] == 4 * 60 * 2 * 40 * 4


def test_a_short_window_needs_one_hop():
    mask = Mask.of(64, True, (5, 0), None)
    layout = fd.sequence_layout(64, 4, balance="contiguous")
    assert hops(layout.slots, 64, mask) == 1
    assert hops(layout.slots, 64, Mask.of(64, True, None, None)) == 3


def scores_of_blocks(layout, mask):
    """How often the blocks of all pairs of ranks cover each score."""
    count = torch.zeros(layout.length, layout.length, dtype=torch.int32)
    for q_rank, k_rank in itertools.product(range(layout.ranks), repeat=2):
        q_at, k_at = (torch.from_numpy(layout.positions(rank)) for rank in (q_rank, k_rank))
        for block in blocks(layout.slots[q_rank], layout.slots[k_rank], layout.length, mask):
            q, k = q_at[slice(*block.q)], k_at[slice(*block.k)]
            assert block.documents is not None or block.shift == q[0] - k[0]
            i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
            diagonal = i + len(k) - len(q)
            left, right = block.window or (None, None)
            seen = torch.ones(len(q), len(k), dtype=torch.bool)
            seen &= True if left is None else j >= diagonal - left
            seen &= True if right is None else j <= diagonal + right
            if block.documents is not None:
                document = torch.bucketize(torch.arange(len(q)), torch.tensor(block.documents), right=True)
                seen &= document[:, None] == document[None]
            count[q[:, None], k[None]] += seen
    return count


@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "work"])
def test_blocks_cover_every_score_once(balance):
    make = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=make))  # noqa: E731
    for _ in range(60):
        length, ranks = draw(0, 50), draw(1, 6)
        window = [(None, None), (draw(0, 9), None), (draw(3, 9), draw(-3, 9)), (None, draw(0, 5))][draw(0, 4)]
        cuts = sorted(draw(0, length + 1) for _ in range(draw(0, 5)))
        documents = torch.tensor([0, *cuts, length]) if draw(0, 2) else None
        causal = bool(draw(0, 2))
        mask = Mask.of(length, causal, window, documents)
        layout = fd.sequence_layout(length, ranks, balance=balance, causal=causal, window=window, cu_seqlens=documents)
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        want = torch.ones(length, length, dtype=torch.bool)
        want &= True if window[0] is None else j >= i - window[0]
        want &= True if window[1] is None else j <= i + window[1]
        want &= True if not causal else j <= i
        if documents is not None:
            of = torch.bucketize(torch.arange(length), documents, right=True)
            want &= of[:, None] == of[None]
        assert (scores_of_blocks(layout, mask) == want).all()


def test_balance():
    def spread(balance, **mask):
        """The largest work of a rank, relative to the mean."""
        layout = fd.sequence_layout(4096, 4, balance=balance, **mask)
        seen = Mask.of(4096, mask.get("causal", False), mask.get("window"), mask.get("cu_seqlens"))
        work = [sum(seen.work(slots)) for slots in layout.slots]
        return max(work) * 4 / sum(work)

    assert spread("contiguous", causal=True) > 1.7 and spread("zigzag", causal=True) < 1.001
    assert spread("work", causal=True) < 1.05
    documents = torch.tensor([0, 100, 2700, 2800, 4096])
    assert spread("work", causal=True, cu_seqlens=documents) < 1.1
    assert spread("zigzag", causal=True, cu_seqlens=documents) > 1.1


def bits(group, rank, count, strategy):
    """The results of one call twice, and those of one process."""
    case = dict(length=40, causal=True, sizes=(4, 2, 16, 16), strategy=strategy)
    (q, k, v, _), _ = inputs(case)
    layout = layout_of(case, count, {})
    shards = [fd.shard_sequence(x, layout, rank) for x in (q, k, v)]
    more = dict(group=group, strategy=strategy, balance=layout, causal=True)
    one = fd.context_parallel_attention(*shards, **more)
    # With `check=False`, nothing but keys and values is sent.
    with fd.traffic() as sent:
        two = fd.context_parallel_attention(*shards, **more, check=False)
    assert sent["call"] == 0 and sent["keys"] + sent["heads"] > 0
    whole = fd.unshard_sequence(two, layout, group)
    return torch.equal(one, two), torch.equal(whole, fulgurite.attention(q, k, v, causal=True))


def test_bits(pool):
    for strategy, of_one_process in (("ring", False), ("ulysses", True)):
        found = pool.run(bits, 2, strategy)
        assert all(again for again, _ in found)
        assert not of_one_process or all(same for _, same in found)


def compiled(group, rank, count):
    case = CASES["odd length"]
    (q, k, v, d_o), _ = inputs(case)
    layout = layout_of(case, count, {})
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank).requires_grad_() for x in (q, k, v, d_o))

    def step(q, k, v):
        return fd.context_parallel_attention(q * 2, k, v, group=group, balance=layout, causal=True) * 3

    one = torch.autograd.grad(step(q, k, v), (q, k, v), d_o)
    two = torch.autograd.grad(torch.compile(step, backend="aot_eager")(q, k, v), (q, k, v), d_o)
    return all(map(torch.equal, one, two))


def test_under_compile(pool):
    assert pool.run(compiled, 2) == [True, True]


def called(group, rank, count, changes):
    """A call that one rank makes differently: `changes` is by rank."""
    own = changes.get(rank, {})
    shape = own.pop("shape", (1, 8, 4, 16))
    q = torch.zeros(shape, dtype=own.pop("dtype", torch.float32), requires_grad=own.pop("requires_grad", False))
    fd.context_parallel_attention(q, *(own.pop(name, q) for name in ("k", "v")), group=group, **own)


WRONG = {
    "dtype": ({1: {"dtype": torch.bfloat16}}, "`q` differs between ranks (rank 0: torch.float32 [1, 8, 4, 16] on cpu"),
    "shape": ({0: {"shape": (1, 10, 4, 16)}}, "`q` differs between ranks (rank 0: torch.float32 [1, 10, 4, 16] on cpu"),
    "heads": ({0: {"shape": (1, 8, 8, 16)}}, "`q` differs between ranks"),
    "scale": ({0: {"scale": 0.5}}, "`options` differs between ranks (rank 0: {'scale': 0.5, 'softcap': None}"),
    "causal": ({0: {"causal": True}}, "`window` differs between ranks (rank 0: [None, 0], rank 1: [None, None])"),
    "balance": ({1: {"balance": "contiguous"}}, "`balance` differs between ranks"),
    "gradients": ({1: {"requires_grad": True}}, "`requires_grad` differs between ranks (rank 0: False, rank 1: True)"),
    "length": ({1: {"length": 17}}, "rank 1 made a wrong call: `q` has 8 rows, allowed: 10"),
    "option": ({0: {"scale": -1.0}}, "rank 0 made a wrong call: `scale` is -1"),
    "no tensor": ({0: {"k": 3}}, "rank 0 made a wrong call: `k` is a int, allowed: a torch tensor of float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_differ_fail_on_every_rank(pool, name):
    changes, message = WRONG[name]
    found = pool.outcomes(called, 2, changes)
    assert not any(ok for ok, _ in found)
    for rank, (_, (kind, text, _)) in enumerate(found):
        if message.startswith(f"rank {rank} made"):
            assert kind == "ValueError" and text.startswith(message.split(": ", 1)[1])
        else:
            assert (kind, text[: len(message)]) == ("MismatchError", message)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"strategy": "tree"}, "`strategy` is 'tree', allowed: 'ring', 'ulysses', '2d'"),
        ({"strategy": "2d"}, "`mesh` has no axes, strategy '2d' needs 2 axes (ring, ulysses)"),
        ({"timeout": 0}, "`timeout` is 0, allowed: seconds, more than 0"),
        ({"balance": "even"}, "`balance` is 'even', allowed: 'contiguous', 'zigzag', 'work', or a Layout"),
        ({"window": (1, -2)}, "`window` is (1, -2), which hides every key, allowed: None for an unbounded side"),
        ({"window": 4}, "`window` is one int, allowed: a pair, keys before and after the query"),
        ({"causal": "top-left"}, "`causal` is 'top-left', allowed: True, False"),
        ({"causal": 1}, "`causal` is 1, allowed: True, False"),
        ({"scale": "half"}, "`scale` is 'half', allowed: a number"),
        ({"mesh": 3}, "`mesh` is a int, allowed: a DeviceMesh"),
        ({"length": -1}, "`length` is -1, allowed: an integer, 0 or more"),
        ({"shape": (8, 4, 16)}, "`q` has shape [8, 4, 16], allowed: [batch, rows, heads, head_dim]"),
        ({"dtype": torch.float64}, "`q` is torch.float64, allowed: a torch tensor of float32, float16 or bfloat16"),
        ({"shape": (1, 8, 3, 16), "strategy": "ulysses"}, "`q` has 3 heads and `k` 3, allowed: a multiple of those of"),
        ({"sinks": torch.zeros(3)}, "`sinks` is torch.Size([3]), allowed: a tensor [4], one value per head"),
        ({"cu_seqlens": torch.tensor([0, 9, 4]), "shape": (8, 4, 16)}, "`cu_seqlens` is [0, 9, 4], allowed: ascending"),
    ],
)
def test_wrong_calls(pool, change, message):
    for ok, result in pool.outcomes(called, 2, {0: change, 1: change}):
        assert not ok and result[0] == "ValueError" and result[1].startswith(message), result


def empty(group, rank, count, strategy):
    """A sequence without rows."""
    q = torch.zeros(2, 0, 4, 16, requires_grad=True)
    o, lse = fd.context_parallel_attention(
        q, q, q, group=group, strategy=strategy, causal=True, scale=torch.tensor(0.5), return_lse=True
    )
    o.sum().backward()
    return tuple(o.shape), tuple(lse.shape), tuple(q.grad.shape)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_sequence_without_rows(pool, strategy):
    assert pool.run(empty, 2, strategy) == [((2, 0, 4, 16), (2, 4, 0), (2, 0, 4, 16))] * 2


def test_wrong_calls_without_ranks():
    layout = fd.sequence_layout(8, 2)
    x = torch.zeros(1, 8, 2)
    for call, message in (
        (lambda: fd.context_parallel_attention(x, x, x), "there is no process group, allowed: after torch.distrib"),
        (lambda: fd.shard_sequence(x, layout, 2), "`rank` is 2, allowed: 0 to 1"),
        (lambda: fd.shard_sequence(x, layout, 0, 2), "`x` has 2 rows on axis 2, allowed: 8, the length of the layout"),
        (lambda: fd.shard_sequence(x, 4, 0), "`layout` is a int, allowed: a Layout from `sequence_layout`"),
        (lambda: fd.sequence_layout(8, 0), "`ranks` is 0, allowed: an integer, 1 or more"),
        (lambda: fd.sequence_layout(8.0, 1), "`length` is 8.0, allowed: an integer, 0 or more"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(message)


def fail(group, rank, count, how):
    """Rank 1 dies or sleeps in the middle of a ring; rank 0 must get an error in time."""
    import time

    from fulgurite.distributed import _ring

    q = torch.zeros(1, 4096, 4, 16)
    start, forward = time.monotonic(), _ring._forward

    def stop(*call):
        os._exit(1) if how == "dies" else time.sleep(3)
        return forward(*call)

    if rank == 1:
        _ring._forward = stop
    try:
        # Two steps: keys of this size do not fit the buffers of the transport.
        for _ in range(2):
            fd.context_parallel_attention(q, q, q, group=group, timeout=1)
    except fd.PeerError as error:
        return time.monotonic() - start, str(error)


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_dead_peer_gives_an_error_in_time(how):
    made = Pool(2)
    try:
        made.pipes[1].send((fail.__module__, "fail", 2, (how,)))
        made.pipes[0].send((fail.__module__, "fail", 2, (how,)))
        assert made.pipes[0].poll(30), "rank 0 hangs"
        ok, (seconds, text) = made.pipes[0].recv()
        assert ok and seconds < 10
        assert text.startswith("rank 0 of 2 got no answer while ") and "Destroy the process group" in text
    finally:
        made.close()


def rule(group, layout, **more):
    """A call of the gated delta rule."""
    rows = [torch.zeros(1, layout.rows, 2, 8, requires_grad=True) for _ in range(3)]
    gates = [torch.zeros(1, layout.rows, 2, requires_grad=True) for _ in range(2)]
    return fd.context_parallel_gated_delta_rule(*rows, *gates, group=group, **more)[0]


def lost(group, rank, count, what):
    """Rank 1 dies in place of the message `what`: the error of rank 0, and how long it took."""
    import time

    from fulgurite.distributed import _exchange

    def dying(kept):
        def call(self, name, *more):
            if rank == 1 and what.removeprefix("back: ") in name and armed:
                os._exit(1)
            return kept(self, name, *more)

        return call

    armed = not what.startswith("back: ")
    _exchange.Group.start = dying(_exchange.Group.start)
    _exchange.Group.collective = dying(_exchange.Group.collective)
    layout = fd.sequence_layout(4096, 2)
    q = torch.zeros(1, layout.rows, 4, 16, requires_grad=True)
    attend = dict(group=group, balance=layout, timeout=2)
    start = time.monotonic()
    try:
        if what == "collecting rows":
            fd.unshard_sequence(q, layout, group, timeout=2)
        elif "states" in what:
            rule(group, fd.sequence_layout(64, 2, balance="contiguous"), timeout=2).sum().backward()
        else:
            strategy = "ulysses" if "heads" in what else "ring"
            o = fd.context_parallel_attention(q, q, q, strategy=strategy, **attend)
            armed = True
            o.sum().backward()
    except fd.PeerError as error:
        return time.monotonic() - start, str(error)


MESSAGES = [
    "agreeing on the call",
    "keys",
    "back: keys",
    "gradients",
    "exchanging heads",
    "back: exchanging heads",
    "handing states on",
    "handing gradients of states on",
    "collecting rows",
]


@pytest.mark.skipif(not LONG, reason="starts a group for each message; FULGURITE_LONG=1 runs it")
@pytest.mark.parametrize("what", MESSAGES)
def test_a_peer_that_dies_in_any_message_gives_an_error(what):
    made = Pool(2)
    try:
        for pipe in made.pipes:
            pipe.send((lost.__module__, "lost", 2, (what,)))
        assert made.pipes[0].poll(60), "rank 0 hangs"
        ok, found = made.pipes[0].recv()
        assert ok and found, found
        assert found[0] < 30 and found[1].startswith("rank 0 of 2 got no answer while "), found
    finally:
        made.close()


def logged(group, rank, count):
    """The log of a rank in a ring: messages that it starts, blocks that it computes, messages that it waits for."""
    from fulgurite.distributed import _exchange, _ring

    log = []
    kept = _exchange.Group.start, _exchange.Group.wait, _ring._forward, _ring._backward

    def logging(name, function):
        def call(*arguments):
            # A message is logged by its kind, a wait by its text.
            log.append(arguments[2].split(",")[0] if name == "wait" else arguments[1] if name == "start" else name)
            return function(*arguments)

        return call

    _exchange.Group.start, _exchange.Group.wait = logging("start", kept[0]), logging("wait", kept[1])
    _ring._forward, _ring._backward = logging("block", kept[2]), logging("block", kept[3])
    try:
        q = torch.zeros(1, 4, 2, 16, requires_grad=True)
        o = fd.context_parallel_attention(q, q, q, group=group, balance="contiguous", check=False)
        forward, log[:] = list(log), []
        o.sum().backward()
    finally:
        _exchange.Group.start, _exchange.Group.wait, _ring._forward, _ring._backward = kept
    return forward, log


def test_messages_are_under_way_while_blocks_are_computed(pool):
    keys, gradients = "passing keys on", "passing gradients on"
    for forward, backward in pool.run(logged, 4):
        assert forward == ["keys", "block", keys] * 3 + ["block"]
        # Gradients of a step travel while the next block is computed; the last ones go home.
        first = ["keys", "block", "gradients", keys]
        middle = ["keys", "block", gradients, "gradients", keys]
        last = ["block", gradients, "gradients", "returning gradients"]
        assert backward == first + 2 * middle + last


@pytest.mark.skipif(not LONG, reason="trains for most of a minute; FULGURITE_LONG=1 runs it")
def test_the_example_has_the_losses_of_one_process():
    example = Path(__file__).resolve().parents[2] / "examples" / "context_parallel_gpt.py"
    if not example.exists():
        pytest.skip("the tests were installed without the examples")
    path = {} if os.environ.get("FULGURITE_INSTALLED") == "1" else {"PYTHONPATH": str(example.parents[1] / "python")}
    run = subprocess.run(
        [sys.executable, str(example)], env={**os.environ, **path}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0 and run.stdout.count("losses differ by") == 3, run.stdout + run.stderr
