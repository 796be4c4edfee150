"""The gated delta rule over ranks: 2 and 4 gloo processes beside the f64 oracle, by the tolerance rule."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="fulgurite.distributed is for torch tensors")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from fulgurite import _variants, fla  # noqa: E402  (after the skip)
from fulgurite import distributed as fd  # noqa: E402


def inputs(case):
    """The tensors of the whole sequence by name, the same in every process, and the gradients of the results."""
    make = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(shape, generator=make)  # noqa: E731
    length, dtype = case["length"], case.get("dtype", torch.float32)
    heads, value_heads, key_dim, value_dim = case.get("sizes", (2, 2, 16, 16))
    batch = 1 if "documents" in case else case.get("batch", 2)
    rows = {"q": normal(batch, length, heads, key_dim), "k": normal(batch, length, heads, key_dim)}
    rows["v"] = normal(batch, length, value_heads, value_dim)
    rows = {name: x.to(dtype) for name, x in rows.items()}
    rows["g"], rows["beta"] = normal(batch, length, value_heads), torch.rand(batch, length, value_heads, generator=make)
    others = {}
    if case.get("state"):
        others["initial_state"] = normal(batch, value_heads, key_dim, value_dim)
    if case.get("gates"):
        others["A_log"], others["dt_bias"] = 0.3 * normal(value_heads), normal(value_heads)
    else:
        rows["g"] = -torch.nn.functional.softplus(rows["g"]) / 4
    d_o = normal(*rows["v"].shape).to(dtype)
    d_final = normal(batch, value_heads, key_dim, value_dim) if case.get("state") else None
    return rows, others, d_o, d_final


def options(case):
    made = {"use_qk_l2norm_in_kernel": True}
    if case.get("gates"):
        made.update(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    if case.get("state"):
        made["output_final_state"] = True
    if "documents" in case:
        made["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(case["documents"])], dtype=torch.int32)
    return made


def delta(group, rank, count, case):
    """One rank: its rows of o, the final state, and the gradients."""
    rows, others, d_o, d_final = inputs(case)
    layout = fd.sequence_layout(case["length"], count, balance="contiguous")
    padding = torch.from_numpy(layout.positions(rank)) >= layout.length
    mine = {name: fd.shard_sequence(x, layout, rank) for name, x in rows.items()}
    d_o = fd.shard_sequence(d_o, layout, rank)
    for x in (*mine.values(), d_o):
        x[:, padding] = math.nan  # padding may hold anything
    leaves = [x.requires_grad_() for x in (*mine.values(), *others.values())]
    more = {"length": case["length"]} if "documents" not in case else {}
    with fd.traffic() as sent:
        o, state = fd.context_parallel_gated_delta_rule(
            **mine, **others, **options(case), **more, group=group, threads=1
        )
        # The final state is on every rank: its gradients add up.
        results, d_results = [o], [d_o]
        if state is not None:
            results, d_results = [o, state], [d_o, d_final / count]
        found = torch.autograd.grad(results, leaves, d_results)
    return [x.detach().float() for x in (o, *([] if state is None else [state]), *found)], dict(sent)


def whole(parts, layout):
    """The rows of all ranks; padding must be 0."""
    joined = torch.cat(parts, 1)
    assert (joined[:, layout.length :] == 0).all()
    return joined[:, : layout.length]


def judge(case, found, layout):
    rows, others, d_o, d_final = inputs(case)
    made = options(case)
    text, tensors = fla._call(
        "chunked", *rows.values(), None, others.get("initial_state"), "output_final_state" in made, True,
        bool(case.get("gates")), others.get("A_log"), others.get("dt_bias"), bool(case.get("gates")),
        bool(case.get("gates")), False, made.get("cu_seqlens"), None, None,
    )  # fmt: skip
    dtype = rows["q"].dtype
    outputs = [whole([each[0] for each in found], layout).to(dtype)]
    if d_final is not None:
        outputs.append(found[0][1])
        assert all(torch.equal(each[1], found[0][1]) for each in found)
    first = len(outputs)
    gradients = [whole([each[first + at] for each in found], layout) for at in range(5)]
    gradients[:3] = [x.to(dtype) for x in gradients[:3]]
    gradients += [sum(each[first + at] for each in found) for at in range(5, 5 + len(others))]
    variant = _variants.variant(text)
    judged = variant.judge(tensors, outputs)
    judged += variant.judge(tensors, outputs, [d_o, d_final], gradients)
    names = {"o", "d_q", "d_k", "d_v"}
    assert {each.name for each in judged} >= (names if case.get("gates") else names | {"d_g", "d_beta"})
    assert not [f"{each.name}: {each.text}" for each in judged if not each.ok]
    if case.get("gates"):  # the oracle has no gradients of raw gates: compare with one process
        want = fla.chunk_gated_delta_rule_backward(
            d_o, *rows.values(), d_final_state=d_final, **others,
            **{name: value for name, value in made.items() if name != "output_final_state"},
        )  # fmt: skip
        for got, one in zip(gradients[3:], want[3:]):
            assert (got - one).abs().max() <= 2e-6 * one.abs().max()


CASES = {
    "plain": dict(length=128),
    "odd length": dict(length=157, sizes=(2, 4, 16, 24)),
    "shorter than its ranks": dict(length=3),
    "states": dict(length=90, state=True),
    "gates": dict(length=70, gates=True, state=True, sizes=(1, 2, 8, 16)),
    "documents": dict(length=151, documents=(30, 1, 80, 0, 40)),
    "documents that end with their ranks": dict(length=128, documents=(32, 32, 64)),
    "bf16": dict(length=100, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(pool, name, count):
    case = CASES[name]
    layout = fd.sequence_layout(case["length"], count, balance="contiguous")
    found = pool.run(delta, count, case)
    judge(case, [each for each, _ in found], layout)
    # Forward sends A and B to each other rank, backward two gradients of a state; f32.
    heads, value_heads, key_dim, value_dim = case.get("sizes", (2, 2, 16, 16))
    state = (1 if "documents" in case else 2) * value_heads * key_dim * 4
    for _, sent in found:
        assert sent["states"] == (count - 1) * state * ((key_dim + value_dim) + 2 * value_dim)
        assert sent["keys"] == sent["gradients"] == sent["heads"] == 0


def test_a_planted_error_is_found(pool):
    case = CASES["odd length"]
    layout = fd.sequence_layout(case["length"], 2, balance="contiguous")
    found = [each for each, _ in pool.run(delta, 2, case)]
    judge(case, found, layout)
    for at, name in enumerate(("o", "d_q", "d_k", "d_v", "d_g", "d_beta")):
        planted = [list(each) for each in found]
        planted[1][at] = planted[1][at] * 1.01
        with pytest.raises(AssertionError, match=f"{name}: WRONG"):
            judge(case, planted, layout)


def called(group, rank, count, changes):
    q = torch.zeros(1, 8, 2, 16)
    gate = torch.zeros(1, 8, 2)
    call = dict(q=q, k=q, v=q, g=gate, beta=gate, group=group)
    fd.context_parallel_gated_delta_rule(**{**call, **changes.get(rank, {})})


@pytest.mark.parametrize(
    "changes,kinds,message",
    [
        (
            {0: {"scale": 0.5}},
            ("MismatchError", "MismatchError"),
            "`options` differs between ranks (rank 0: {'scale': 0.5",
        ),
        ({1: {"v": torch.zeros(1, 8, 2, 8)}}, ("MismatchError", "MismatchError"), "`v` differs between ranks"),
        (
            {1: {"length": 9}},
            ("MismatchError", "ValueError"),
            "`q` has 8 rows, allowed: 5, the share of 9 rows; pad it",
        ),
        (
            {0: {"g": None}},
            ("ValueError", "MismatchError"),
            "`g` is None, allowed: a tensor [batch, rows, value_heads]",
        ),
        (
            {0: {"A_log": torch.zeros(2)}},
            ("ValueError", "MismatchError"),
            "`A_log` was given, allowed: only with `use_gate_in_kernel`; leave it out",
        ),
        (
            dict.fromkeys((0, 1), {"cu_seqlens": torch.tensor([0, 16]), "output_final_state": True}),
            ("ValueError", "ValueError"),
            "`cu_seqlens` was given, allowed: a batch of 1, without `initial_state` and `output_final_state`",
        ),
    ],
)
def test_wrong_calls(pool, changes, kinds, message):
    for (ok, result), kind in zip(pool.outcomes(called, 2, changes), kinds):
        assert not ok and result[0] == kind, result
        text = result[1].split("made a wrong call: ")[-1]
        assert text.startswith(message), text
