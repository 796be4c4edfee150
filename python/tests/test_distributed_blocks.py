"""Blocks of scores at global positions, the merge of their results, and the timeline of a ring."""

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="fulgurite.distributed is for torch tensors")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from test_distributed import CASES, inputs, layout_of  # noqa: E402  (after the skip)

from fulgurite import _api, _dispatch  # noqa: E402
from fulgurite import distributed as fd  # noqa: E402


def judge(case, o, lse, gradients):
    """Judges results over all keys beside the oracle."""
    (q, k, v, d_o), extras = inputs(case)
    more = {name: case[name] for name in ("causal", "window", "softcap", "scale") if name in case}
    slopes = {name: extras[name] for name in ("alibi_slopes",) if name in extras}
    if "cu_seqlens" in extras:
        slopes["cu_seqlens"] = (extras["cu_seqlens"],) * 2
    text, tensors = _api._described(q, k, v, **more, **slopes)
    description = _dispatch.description(text)
    judged = description.judge(q, k, v, tensors, [o, lse])
    judged += description.judge(q, k, v, tensors, gradients, (o, lse, d_o, None))
    assert not [f"{each.name}: {each.text}" for each in judged if not each.ok]


@pytest.mark.parametrize(
    "case,cuts",
    [
        (dict(length=61, causal=True, sizes=(4, 2, 16, 24)), (0, 7, 40)),
        (dict(length=50, window=(11, 4), dtype=torch.bfloat16), (0, 25)),
        (dict(length=50, causal=True, alibi_slopes=True, dtype=torch.float16), (0, 1, 49)),
        (dict(length=40, window=(20, -3), softcap=3.0, scale=0.3), (0, 13, 14)),
        (dict(length=63, documents=(1, 17, 0, 30, 15), causal=True), (0, 20, 50)),
    ],
)
def test_blocks_make_the_whole(case, cuts):
    (q, k, v, d_o), extras = inputs(case)
    packed = "documents" in case
    rows = [x[None] if packed else x for x in (q, k, v, d_o)]
    length, dtype = case["length"], q.dtype
    chunks = list(zip(cuts, (*cuts[1:], length)))
    mask = {name: case[name] for name in ("causal", "window", "softcap", "scale") if name in case}
    mask.update(extras)
    part = lambda x, chunk: x[:, slice(*chunk)]  # noqa: E731
    found = []
    for a in chunks:
        # What is given may hold anything where its LSE is -inf.
        into = (
            torch.full((*part(rows[0], a).shape[:3], rows[2].shape[3]), math.nan),
            torch.full((rows[0].shape[0], rows[0].shape[2], a[1] - a[0]), -math.inf),
        )
        for b in chunks:
            q_, k_, v_ = part(rows[0], a), part(rows[1], b), part(rows[2], b)
            into = fd.block_attention(q_, k_, v_, q_start=a[0], k_start=b[0], into=into, threads=1, **mask)
        found.append([x.clone() for x in into])
    o, lse = torch.cat([x for x, _ in found], 1), torch.cat([x for _, x in found], 2)
    assert o.dtype == torch.float32
    o = o.to(dtype)
    totals = [torch.zeros(x.shape) for x in rows[:3]]
    for a in chunks:
        for b in chunks:
            into = [part(total, chunk) for total, chunk in zip(totals, (a, b, b))]
            given = (part(rows[3], a), part(rows[0], a), part(rows[1], b), part(rows[2], b))
            kept = part(o, a), lse[:, :, slice(*a)].contiguous()
            fd.block_attention_backward(*given, *kept, q_start=a[0], k_start=b[0], into=into, threads=1, **mask)
    gradients = [x.to(dtype) for x in totals]
    if packed:
        o, lse, gradients = o[0], lse[0], [x[0] for x in gradients]
    judge(case, o, lse, gradients)


def test_a_block_without_visible_keys_or_rows():
    q = torch.randn(2, 5, 4, 16)
    for keys, more in ((q, dict(k_start=5, causal=True)), (q[:, :0], {}), (q, dict(q_start=90, window=(3, 3)))):
        o, lse = fd.block_attention(q, keys, keys, **more)
        assert (o == 0).all() and (lse == -math.inf).all() and o.shape == q.shape
        gradients = fd.block_attention_backward(q, q, keys, keys, q, torch.zeros(2, 4, 5), **more)
        assert all((x == 0).all() for x in gradients) and gradients[1].shape == keys.shape
    o, lse = fd.block_attention(q[:, :0], q, q)
    assert o.shape == (2, 0, 4, 16) and lse.shape == (2, 4, 0)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(q_start=-1), "`q_start` is -1, allowed: an integer, 0 or more"),
        (dict(k_start=1.0), "`k_start` is 1.0, allowed: an integer, 0 or more"),
        (dict(q=torch.zeros(4, 2, 16)), "`q` has shape [4, 2, 16], allowed"),
        (dict(v=3), "`v` is a int, allowed: a tensor [batch, rows, heads, head_dim]"),
        (dict(into=(torch.zeros(1, 4, 2, 16).bfloat16(), torch.zeros(1, 2, 4))), "`into` has `o` as torch.bfloat16"),
        (dict(into=(torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2))), "`into` has `lse` as torch.float32 [1, 4, 2]"),
        (dict(cu_seqlens=torch.tensor([0, 3])), "`cu_seqlens` ends at 3, allowed: 4 or more"),
        (dict(cu_seqlens=torch.tensor([0, 3, 9]), k_start=1), "queries at 0 to 4 and keys at 1 to 5 overlap"),
    ],
)
def test_wrong_blocks(change, message):
    x = torch.zeros(1, 4, 2, 16)
    call = {"q": x, "k": x, "v": x, **change}
    with pytest.raises(ValueError) as error:
        fd.block_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    text = str(error.value)
    assert text.startswith(message.removesuffix(", allowed")) or text.startswith("`q` is [4, 2, 16]"), text


def test_a_margin_of_sms():
    for count in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`count` is .*, allowed: a number of SMs"):
            with fd.sm_margin(count):
                pass


def recorded(group, rank, count, case):
    (q, k, v, d_o), extras = inputs(case)
    layout = layout_of(case, count, extras)
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank).requires_grad_() for x in (q, k, v, d_o))
    with fd.timeline() as spans:
        fd.context_parallel_attention(q, k, v, group=group, balance=layout, causal=True).backward(d_o)
    return [tuple(each) for each in spans]


def test_a_timeline_shows_messages_under_computation(pool, tmp_path):
    case = dict(CASES["causal"], length=1024, sizes=(8, 8, 64, 64))
    ranks = [[fd.Span(*each) for each in spans] for spans in pool.run(recorded, 4, case)]
    for spans in ranks:
        of = lambda kind: [each for each in spans if each.kind == kind]  # noqa: E731, B023
        # Three hops of keys each way, and four of gradients.
        assert [each.name for each in of("message")].count("keys") == 6
        assert [each.name for each in of("message")].count("gradients") == 4
        # One wait for the agreement on the call.
        assert len(of("wait")) == 11 and all(each.start <= each.end for each in spans)
        under = [
            (message, block)
            for message in of("message")
            for block in of("compute")
            if message.name == "keys" and message.start < block.start and block.end < message.end
        ]
        assert len(under) >= 6  # each message of keys has a block under it
    fd.write_trace(tmp_path / "ring.json", ranks)
    events = json.loads((tmp_path / "ring.json").read_text())["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1, 2, 3}
    assert len([each for each in events if each["ph"] == "X"]) == sum(map(len, ranks))
