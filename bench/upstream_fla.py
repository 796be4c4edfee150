"""flash-linear-attention's public tests of the gated delta rule with fulgurite in its place, on CPU tensors.

    python bench/upstream_fla.py FOLDER [--tokens 600] [--out FILE]

FOLDER is a checkout of github.com/fla-org/flash-linear-attention; nothing of it is in this repository. Its test file
tests/ops/test_gdn.py is read, and its imports get our functions and its own references. Cases with more than `--tokens`
tokens are left out, because the reference computes one token after the other. A case has passed, was wrong, was skipped
by the test itself, or was refused with an error that names an argument. Tests of its kernels' parts are internal. The
exit status is 1 if a case was wrong.
"""

import argparse
import collections
import importlib.util
import inspect
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import pytest  # noqa: E402
import torch  # noqa: E402

from fulgurite import fla as ours  # noqa: E402

INTERNAL = ("blackwell", "flash_qla", "wy_repr", "test_gate")


def assert_close(name, want, got, ratio, err_atol=1e-6):
    """fla's measure: the root mean square of the difference, relative to that of the reference."""
    want, got = want.detach().double(), got.detach().double()
    error = (want - got).square().mean().sqrt() / (want.square().mean().sqrt() + 1e-8)
    assert (want - got).abs().max() <= err_atol or error < ratio, f"{name}: {error:.2e} of {ratio:.0e}"


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stub(name, **entries):
    module = types.ModuleType(name)
    module.__dict__.update(entries)
    module.__path__ = []
    sys.modules[name] = module


def naive_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """The definition of the gate."""
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return (-A_log.float().exp() * torch.nn.functional.softplus(g)).to(output_dtype)


def tests(folder):
    """The test module, with our functions."""
    flags = "IS_INTEL_ALCHEMIST IS_NPU IS_NVIDIA_BLACKWELL IS_NVIDIA_HOPPER IS_NVIDIA_SM100 IS_NVIDIA_SM120".split()
    functions = {name: getattr(ours, name) for name in ours.__all__}
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule.backends", "fla.ops.backends"):
        stub(name)
    stub("fla.ops.gated_delta_rule", **functions)
    stub("fla.utils", **dict.fromkeys(flags, False), assert_close=assert_close, device="cpu")
    stub("fla.ops.gated_delta_rule.gate", fused_gdn_gate=None, naive_gdn_gate=naive_gdn_gate)
    stub("fla.ops.gated_delta_rule.wy_fast", prepare_wy_repr_bwd=None, recompute_w_u_fwd=None)
    load("fla.ops.gated_delta_rule.naive", folder / "fla/ops/gated_delta_rule/naive.py")
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # its own switch: run cases with more value heads than heads
    return load("test_gdn", folder / "tests/ops/test_gdn.py")


def cases(function):
    """The arguments of each case that pytest's marks ask for."""
    all_ = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, values = mark.args[0], mark.args[1]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        found = []
        for value in values:
            value = getattr(value, "values", value)
            value = value if isinstance(value, (tuple, list)) and len(names) > 1 or hasattr(value, "count") else (value,)
            found.append(dict(zip(names, value)))
        all_ = [{**a, **b} for a in all_ for b in found]
    return all_


def tokens(case):
    lengths = case.get("cu_seqlens")
    return case.get("T") or (lengths[-1] if lengths else 0)


def outcome(function, case):
    try:
        function(**case)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except (ValueError, NotImplementedError) as refused:
        return "refused", str(refused).splitlines()[0]
    except (AssertionError, TypeError, RuntimeError, pytest.fail.Exception) as wrong:
        return "wrong", str(wrong).splitlines()[0]
    return "passed", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    module, lines, total = tests(arguments.folder), [], collections.Counter()
    for name, function in list(vars(module).items()):
        if not name.startswith("test_") or not inspect.isfunction(function):
            continue
        if any(part in name for part in INTERNAL):
            lines.append(f"{name}: internal")
            continue
        counts, notes = collections.Counter(), set()
        for case in cases(function):
            if tokens(case) > arguments.tokens:
                counts["longer"] += 1
                continue
            kind, why = outcome(function, case)
            counts[kind] += 1
            if why:
                notes.add(f"    {kind}: {why}")
        total += counts
        lines.append(f"{name}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
        lines += sorted(notes)
        print(lines[-1 - len(notes)], *sorted(notes), sep="\n", flush=True)
    lines.append("all: " + ", ".join(f"{n} {kind}" for kind, n in sorted(total.items())))
    print(lines[-1])
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
