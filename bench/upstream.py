"""Other projects' public tests with fulgurite in the place of their functions, on CPU tensors.

    python bench/upstream.py --flash-attention FOLDER --attention-gym FOLDER [--cases 200] [--seed 0] [--suite NAME]
                             [--out docs/lab/results/upstream.txt]

The folders are checkouts of github.com/Dao-AILab/flash-attention and github.com/meta-pytorch/attention-gym; nothing of
them is in this repository. Their test files are read, "cuda" becomes "cpu", and their imports get our functions:

    flash2   tests/test_flash_attn.py           flash3   hopper/test_flash_attn.py
    flash4   tests/cute/test_flash_attn.py      gym      the masks and modifiers of attn_gym, beside eager attention

Cases are drawn with a seed, small shapes only (`--scores` bounds queries x keys). A case has passed, was wrong, was
skipped by the test itself, was refused with an error that names an argument, or is internal: the test reaches into
kernels that only the other project has. `bound 0` is an assertion that allows no difference at all: with a single key
the gradient of q is 0, PyTorch on a CPU finds exactly 0, and the bound is a multiple of PyTorch's error. The difference
is below 1e-5. The exit status is 1 if a case was wrong.
"""

import argparse
import collections
import importlib
import itertools
import random
import re
import sys
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402

import fulgurite  # noqa: E402

torch.set_num_threads(1)
# Tests that need a GPU whatever computes the attention, by the reason.
ELSEWHERE = {
    "race_condition": "a thousand repetitions at full size",
    "overflow": "tensors of many gigabytes",
    "opcheck": "operators of torch.ops.flash_attn_3",
    "bw_compatibility": "schemas of torch.ops.flash_attn_3",
    "cache_separates": "their cache of compiled kernels",
    "generator_arg": "their C++ entry point",
    "block_table_bounds": "their C++ entry point",
    "cumsum_metadata": "the fields of their schedules",
    "invalid_head_dim": "head sizes that only their kernels lack",
    "sm120": "one generation of GPUs",
}
OURS = [name for name in fulgurite.__all__ if name.startswith("flash_attn") or name == "get_scheduler_metadata"]


class Internal(Exception):
    """A test calls what only the other project has."""


def stub(name, **entries):
    """A module of this name that has these entries."""
    module = types.ModuleType(name)
    module.__dict__.update(entries)
    module.__path__ = []
    sys.modules[name] = module
    return module


def internal(name):
    def call(*args, **kwargs):
        raise Internal(name)

    return call


def rotary(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Their rotary embedding, whose kernel needs a GPU, in float64."""
    batch, length = x.shape[:2]
    start = seqlen_offsets if torch.is_tensor(seqlen_offsets) else torch.full((batch,), seqlen_offsets)
    at = start.long()[:, None] + torch.arange(length)
    by_cos, by_sin = cos[at].double()[:, :, None], sin[at].double()[:, :, None]
    half = cos.shape[1]
    a, b = (
        (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    a, b = a.double(), b.double()
    first, second = a * by_cos - b * by_sin, a * by_sin + b * by_cos
    turned = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def read(path, name, change=lambda text: text):
    """A file of another project as a module, with the GPU replaced by the CPU."""
    text = change(path.read_text()).replace('"cuda"', '"cpu"').replace("'cuda'", "'cpu'")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def without_gpu():
    """torch.cuda as the tests use it."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None
    properties = types.SimpleNamespace(total_memory=80 << 30, multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def flash2(folder):
    ours = {name: getattr(fulgurite, name) for name in OURS}
    stub("flash_attn", **ours)
    read(folder / "flash_attn/bert_padding.py", "flash_attn.bert_padding")
    inner = {name: internal(name) for name in ("_get_block_size_n", "_flash_attn_varlen_forward")}
    stub("flash_attn.flash_attn_interface", USE_TRITON_ROCM=False, **ours, **inner)
    stub("flash_attn.layers")
    stub("flash_attn.layers.rotary", apply_rotary_emb=rotary)
    return read(folder / "tests/test_flash_attn.py", "upstream_flash2")


def flash3(folder):
    stub("flash_attn")
    stub("flash_attn.layers")
    stub("flash_attn.layers.rotary", apply_rotary_emb=rotary)
    read(folder / "hopper/padding.py", "padding")
    read(folder / "hopper/test_util.py", "test_util")
    stub("flash_attn_interface", **{name: getattr(fulgurite, name) for name in OURS})
    return read(folder / "hopper/test_flash_attn.py", "upstream_flash3")


def flash4(folder):
    stub("flash_attn")
    stub("flash_attn.layers")
    stub("flash_attn.layers.rotary", apply_rotary_emb=rotary)
    stub("flash_attn.cute")
    stub("flash_attn.cute.cache_utils", JITCache=internal("JITCache"))
    read(folder / "flash_attn/cute/testing.py", "flash_attn.cute.testing")
    inner = {name: internal(name) for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla")}
    with_lse = {name: four(getattr(fulgurite, name)) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    stub("flash_attn.cute.interface", get_scheduler_metadata=fulgurite.get_scheduler_metadata, **with_lse, **inner)
    return read(folder / "tests/cute/test_flash_attn.py", "upstream_flash4")


def four(function):
    """FlashAttention-4 always returns (out, lse); lse is None unless it was asked for."""

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        return result if isinstance(result, tuple) else (result, None)

    return call


def axes(test):
    """(names, choices) of each parametrization of a test; a choice has one value for each name."""
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, choices = mark.args[:2]
            names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
            choices = [getattr(choice, "values", choice if len(names) > 1 else (choice,)) for choice in choices]
            yield names, choices


def elsewhere(name, test):
    """Why a test is not drawn; None if it is."""
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "skipif" and mark.args and mark.args[0]:
            return mark.kwargs.get("reason", "skipped by its author")
    return next((reason for part, reason in ELSEWHERE.items() if part in name), None)


def drawn(module, count, scores, seed):
    """Cases of the tests in a module, as (name, function, arguments), and the tests that are not drawn. Every test has
    the same share as long as it has cases that differ."""
    generator = random.Random(seed)
    tests = {name: each for name, each in vars(module).items() if name.startswith("test_") and callable(each)}
    skipped = {name: reason for name, test in tests.items() if (reason := elsewhere(name, test)) is not None}
    pools = []
    for name, test in tests.items():
        if name in skipped:
            continue
        cases = {}
        for _ in range(50 * count):
            case = {key: value for names, choices in axes(test) for key, value in zip(names, generator.choice(choices))}
            lengths = [value for key, value in case.items() if "seqlen" in key and type(value) is int]
            if not lengths or max(lengths) * lengths[-1] <= scores:
                cases[repr(case)] = (name, test, case)
            if len(cases) >= count:
                break
        pools.append(list(cases.values()))
    mixed = [case for turn in itertools.zip_longest(*pools) for case in turn if case is not None]
    return mixed[:count], skipped


def named(error):
    """The message of a refusal of ours that names an argument; None if the error is something else."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = any("fulgurite" in frame.filename and "bench" not in frame.filename for frame in frames[-4:])
    found = re.match(r"(?:`\w+`: )?`(\w[\w.]*)`", str(error))
    if ours and found and isinstance(error, (NotImplementedError, ValueError)):
        return re.sub(r"\d{2,}", "N", str(error))[:100]
    return None


def outcome(call):
    """(kind, detail) of one case."""
    import pytest

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        return "passed", ""
    except (pytest.skip.Exception, pytest.xfail.Exception) as error:
        return "skipped", str(error)
    except Internal as error:
        return "internal", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        name = named(error)
        if name is not None:
            return "refused", name
        difference = beside_zero(error)
        if difference is not None and difference < 1e-5:
            return "bound 0", "a gradient that is 0 in the reference"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"{type(error).__name__}: {str(error)[:200]!r} at {Path(frame.filename).name}:{frame.lineno}"


def beside_zero(error):
    """The difference from a reference of 0 that PyTorch meets exactly, so that the assertion allows nothing; or None."""
    if not isinstance(error, AssertionError):
        return None
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    text = Path(frame.f_code.co_filename).read_text().splitlines()[line - 1]
    known = {**frame.f_globals, **frame.f_locals}
    found = re.search(r"\((\w+) - \1_ref\)", text)
    names = (found[1], f"{found[1]}_ref", f"{found[1]}_pt") if found else ("actual", "ref", "pt")
    got, reference, peer = map(known.get, names)
    if (
        got is None
        or reference is None
        or peer is None
        or (peer - reference).abs().max() != 0
        or reference.abs().max() != 0
    ):
        return None
    return float((got - reference).abs().max())


def quiet(call):
    """The call without its prints."""
    import contextlib
    import io

    def silent():
        with contextlib.redirect_stdout(io.StringIO()):
            call()

    return silent


# attention-gym ------------------------------------------------------------------------------------------------------


def gym_cases(folder, count, seed):
    """(name, call) of masks and modifiers, with drawn sizes: ours beside eager FlexAttention of torch."""
    stub("attn_gym").__path__ = [str(folder / "attn_gym")]
    masks, mods = importlib.import_module("attn_gym.masks"), importlib.import_module("attn_gym.mods")
    vsa = importlib.import_module("attn_gym.masks.vsa")
    generator = random.Random(seed)
    pick, draw = generator.choice, torch.Generator().manual_seed(seed)

    def whole(*shape, high):
        return torch.randint(0, high, shape, generator=draw)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).requires_grad_()

    def offsets(length):
        cuts = sorted(generator.sample(range(1, length), 3))
        return torch.tensor([0, *cuts, length])

    def tiles(length):
        kept = whole(2, 4, length // 16, 2, high=length // 16).sort(-1).values
        return vsa.generate_vsa_mask_mod(kept, 16)

    causal = masks.causal_mask
    makers = {
        "causal": lambda n: ("mask", causal),
        "sliding window": lambda n: ("mask", masks.generate_sliding_window(pick([3, 10, 40]))),
        "dilated window": lambda n: ("mask", masks.generate_dilated_sliding_window(pick([2, 6]), pick([2, 3]))),
        "global window": lambda n: ("mask", masks.generate_global_sliding_window(pick([3, 10]), whole(n, high=8) == 0)),
        "prefix": lambda n: ("mask", masks.generate_prefix_lm_mask(pick([1, 9, n // 2]))),
        "documents": lambda n: ("mask", masks.generate_doc_mask_mod(causal, offsets(n))),
        "packed documents": lambda n: ("mask", masks.generate_packed_causal_doc_mask_mod(offsets(n))),
        "shared prefix": lambda n: ("mask", masks.generate_shared_prefix_mask_mod(offsets(n), torch.tensor([0, 0, 0, 2]))),
        "block diffusion": lambda n: ("mask", masks.generate_block_diffusion_mask(n // 2, pick([4, 8]))),
        "batchify": lambda n: ("mask", masks.batchify_mask_mod(causal, n // 2)),
        "natten": lambda n: ("mask", masks.generate_natten(8, n // 8, 3, 3)),
        "tiled natten": lambda n: ("mask", masks.generate_tiled_natten(8, n // 8, 3, 3, 4, 4)),
        "morton natten": lambda n: ("mask", masks.generate_morton_natten(8, 8, 3, 3)),
        "sta 2d": lambda n: ("mask", masks.generate_sta_mask_mod_2d((8, n // 8), (4, 4), (2, 2))),
        "sta 3d": lambda n: ("mask", masks.generate_sta_mask_mod_3d((4, 4, n // 16), (2, 2, 2), (2, 2, 2))),
        "svg spatial": lambda n: ("mask", masks.generate_spatial_head_mask_mod(8, 4, (n - 8) // 4, 2, pick([True, False]), 8)),
        "svg temporal": lambda n: ("mask", masks.generate_temporal_head_mask_mod(8, 4, (n - 8) // 4, 2)),
        "jetspec tree": lambda n: ("mask", masks.generate_jetspec_tree_causal_mask_mod(n - 5, masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 2], "cpu")), (5, n)),
        "jetspec training": lambda n: ("mask", masks.generate_jetspec_training_mask_mod(n // 2, 4)),
        "vsa": lambda n: ("mask", tiles(n)),
        "vsa block map": lambda n: ("mask", vsa.generate_vsa_block_map_mask_mod(whole(2, 4, n // 16, n // 16, high=2) == 0, 16)),
        "vsa padding": lambda n: ("mask", vsa.generate_vsa_padding_mask_mod(1 + whole(n // 16, high=16), 16)),
        "flamingo": lambda n: ("mask", masks.generate_vision_cross_attention_mask_mod(torch.stack([whole(3, high=n // 2), n // 2 + whole(3, high=n // 2)], -1), n // 3), (n, n // 3 * 3)),
        "alibi": lambda n: ("score", mods.generate_alibi_bias(4)),
        "softcap": lambda n: ("score", mods.generate_tanh_softcap(pick([2, 20]))),
        "softcap approx": lambda n: ("score", mods.generate_tanh_softcap(20, approx=True)),
        "sandwich": lambda n: ("score", mods.generate_sandwich_bias(4, n)),
        "graphormer spatial": lambda n: ("score", mods.generate_graphormer_spatial_bias(normal(4, 6), whole(2, n, n, high=6).int())),
        "activation relu": lambda n: ("score", mods.generate_activation_score_mod(torch.relu)),
        "activation sigmoid": lambda n: ("score", mods.generate_activation_score_mod(torch.sigmoid)),
        "activation silu": lambda n: ("score", mods.generate_activation_score_mod(torch.nn.functional.silu)),
        "activation gelu": lambda n: ("score", mods.generate_activation_score_mod(torch.nn.functional.gelu)),
        "latent attention": lambda n: ("score", mods.generate_mla_rope_score_mod(normal(2, 4, n, 8), normal(2, 1, n, 8), 4)),
    }  # fmt: skip
    for at in range(count):
        name = list(makers)[at % len(makers)]
        length = 64 if name == "morton natten" else pick([64, 96, 128])
        yield name, lambda name=name, length=length: gym_case(length, *makers[name](length))


def gym_case(length, kind, function, lengths=None):
    """Compares outputs and gradients; a mask by block masks of ours and of torch."""
    from torch.nn.attention import flex_attention as flex

    torch.manual_seed(length)
    q_len, k_len = lengths or (length, length)
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (q_len, k_len, k_len))
    d_o = torch.randn(2, 4, q_len, 16)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) / 4
    if kind == "mask":
        keep = flex.create_mask(function, 2, 4, q_len, k_len, device="cpu")
        scores = scores.masked_fill(~keep, -torch.inf)
        ways = [
            {"block_mask": make(function, 2, 4, q_len, k_len, device="cpu", BLOCK_SIZE=16)}
            for make in (fulgurite.create_block_mask, flex.create_block_mask)
        ]
    else:
        index = [torch.arange(n) for n in (2, 4, q_len, k_len)]
        scores = flex._vmap_for_bhqkv(function, prefix=(0,))(scores, *index)
        ways = [{"score_mod": function}]
    seen = scores > -torch.inf
    shares = torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    want = torch.where(seen, shares, 0.0) @ exact[2]
    wanted = torch.autograd.grad(want, exact, d_o.double())
    for way in ways:
        out = fulgurite.flex_attention(q, k, v, **way)
        for got, exactly in zip((out, *torch.autograd.grad(out, (q, k, v), d_o)), (want, *wanted)):
            torch.testing.assert_close(got.double(), exactly, atol=2e-5, rtol=2e-4)


# ---------------------------------------------------------------------------------------------------------------------

SUITES = {"flash2": flash2, "flash3": flash3, "flash4": flash4}


def run(suite, given):
    """(rows of (test, kind, detail), tests that need a GPU)."""
    if suite == "gym":
        cases = [(name, call) for name, call in gym_cases(given.attention_gym, given.cases, given.seed)]
        skipped = {}
    else:
        chosen, skipped = drawn(SUITES[suite](given.flash_attention), 4 * given.cases, given.scores, given.seed)
        cases = [(f"{name} {case}", quiet(lambda test=test, case=case: test(**case))) for name, test, case in chosen]
    rows = []
    for at, (name, call) in enumerate(cases):
        kind, detail = outcome(call)
        rows.append((name, kind, detail))
        if sum(kind not in ("skipped", "internal") for _, kind, _ in rows) >= given.cases:
            break
        if kind == "wrong" or given.verbose:
            print(f"{suite} {at + 1} {kind}: {name}: {detail}", flush=True)
    return rows, skipped


def report(results, given):
    """The table as text."""
    kinds = ("passed", "wrong", "bound 0", "refused", "skipped", "internal")
    lines = [
        __doc__.splitlines()[0],
        f"torch {torch.__version__}, fulgurite {fulgurite.__version__}, seed {given.seed}",
        "",
    ]
    lines.append(f"{'suite':8} {'cases':>6} " + " ".join(f"{kind:>9}" for kind in kinds))
    for suite, (rows, _) in results.items():
        counts = collections.Counter(kind for _, kind, _ in rows)
        lines.append(f"{suite:8} {len(rows):6} " + " ".join(f"{counts[kind]:9}" for kind in kinds))
    for suite, (rows, skipped) in results.items():
        lines += ["", f"## {suite}", ""]
        for kind in ("wrong", "bound 0", "refused", "internal", "skipped"):
            details = collections.Counter(detail for _, found, detail in rows if found == kind)
            lines += [f"{kind:9} {count:4}  {detail}" for detail, count in details.most_common()]
        lines += [f"not drawn       {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-attention", type=Path, help="a checkout of flash-attention")
    parser.add_argument("--attention-gym", type=Path, help="a checkout of attention-gym")
    parser.add_argument("--suite", choices=[*SUITES, "gym"], action="append", help="default: all")
    parser.add_argument("--cases", type=int, default=200, help="of each suite, those not counted that it skips itself")
    parser.add_argument("--scores", type=int, default=256 * 256, help="at most this many scores per head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--out", type=Path, help="where the table goes")
    given = parser.parse_args()
    without_gpu()
    results = {}
    for suite in given.suite or [*SUITES, "gym"]:
        if (given.attention_gym if suite == "gym" else given.flash_attention) is None:
            print(f"{suite}: no folder was given")
            continue
        results[suite] = run(suite, given)
    text = report(results, given)
    print(text)
    if given.out:
        given.out.write_text(text)
    return 1 if any(kind == "wrong" for rows, _ in results.values() for _, kind, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
