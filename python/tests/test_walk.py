"""A sample of the walk over transformers models (`bench/transformers_walk.py`), and that the walk finds what is wrong."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fulgurite  # noqa: E402
from fulgurite import huggingface  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "bench/transformers_walk.py"
if not SCRIPT.exists():
    pytest.skip("the tests were installed without the scripts", allow_module_level=True)
spec = importlib.util.spec_from_file_location("transformers_walk", SCRIPT)
walk = importlib.util.module_from_spec(spec)
spec.loader.exec_module(walk)


@pytest.fixture(autouse=True)
def _registered():
    """The walk counts calls with a function of its own."""
    threads = torch.get_num_threads()
    fulgurite.register_with_transformers()
    yield
    torch.set_num_threads(threads)
    fulgurite.register_with_transformers()


def rows(model_type):
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {model_type}")
    return walk.checked(model_type)


@pytest.mark.parametrize("model_type", ["bert", "t5", "bart", "gemma3_text", "qwen2_vl", "vit", "clip", "wav2vec2"])
def test_right(model_type):
    """Encoders, encoder-decoders with biases, windows, positions of several axes, images, pairs, sound."""
    for row in rows(model_type):
        assert row["state"] == "ok" and row["calls"] > 0, row
        assert row["cells"]["none"] == "ok" and row["cells"]["train"] == "ok", row


def test_refused_by_name():
    (row,) = rows("bloom")
    assert row["state"] == "refused" and "BloomForCausalLM" in row["remark"], row


def test_what_is_wrong_is_found(monkeypatch):
    right = huggingface.attention_forward

    def without_mask(module, query, key, value, attention_mask=None, **kwargs):
        return right(module, query, key, value, None, **{**kwargs, "is_causal": False})

    monkeypatch.setattr(huggingface, "attention_forward", without_mask)
    (row,) = rows("llama")
    assert row["state"] == "wrong", row
    assert all(row["cells"][name].startswith("WRONG") for name in ("none", "left", "right", "dynamic", "train")), row
