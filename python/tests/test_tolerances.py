"""One tolerance: attention results are compared by `judge`, and bounds of any other comparison are named here."""

import re
from pathlib import Path

# Comparisons that are not of one attention call with its oracle: files, and how many of their lines have a bound.
OTHERS = {
    "test_estimators.py": None,  # any number: clusters, neighbours and projections against NumPy and scikit-learn
    "test_shards.py": None,  # any number: clusters, neighbours and components over shards against NumPy and one process
    "test_transformers.py": None,  # any number: whole models against another library
    "test_gpu.py": 2,  # logits and losses of whole models in bf16 against another library
    "test_diffusers.py": 1,  # a whole model against another library
    "test_sentence_transformers.py": 1,  # embeddings of a whole model against another library
    "test_distributed_delta.py": 1,  # gradients of raw gates, which the oracle lacks: over ranks and in one process, in f32
    "test_distributed_peers.py": 2,  # PyTorch's own context against ours; delta, a sum in f32, against torch's
    "test_gated_delta.py": 2,  # differences of results in f32; a layer of a model against another library
    "test_insight.py": 5,  # two results in f32, merged, which is no call with an oracle
    "test_skip.py": 3,  # differences of results in f32; decisions too close to call; what calibration leaves out
    "test_variants.py": 1,  # differences of results in f32
    "test_ops.py": 1,  # a row-wise product, whose bound is derived there
    "test_torch_autograd.py": 1,  # gradients of a compiled graph against those of the same graph without the compiler
}
BOUND = re.compile(r"\b(?:atol|rtol|rel|abs)=(?!0\b)|allclose\(|approx\(|(?:<|<=|\+) *[\d.]+e-\d+|<= *[\d.]+ *\*")


def bounds(text):
    return [line.strip() for line in text.splitlines() if BOUND.search(line)]


def test_no_other_tolerance():
    for file in sorted(Path(__file__).parent.glob("*.py")):
        allowed = OTHERS.get(file.name, 0)
        if allowed is not None and file.name != Path(__file__).name:
            found = bounds(file.read_text())
            assert len(found) == allowed, (file.name, found)


def test_planted_tolerances_are_found():
    planted = [
        "np.testing.assert_allclose(got, want, atol=3e-5)",
        "torch.testing.assert_close(got, want, atol=1e-6, rtol=0)",
        "assert (got - want).norm() <= 0.01 * want.norm()",
        "assert abs(got - want).max() < 2e-2",
        "assert (got - want).abs().max() <= share * want.std() * 4 + 1e-3",
        "assert got == pytest.approx(want)",
    ]
    assert [bounds(line) for line in planted] == [[line] for line in planted]
    assert not bounds("torch.testing.assert_close(got, want, atol=0, rtol=0)\nsteps = 1e-5\nclose(o, want)")
