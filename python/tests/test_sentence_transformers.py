"""sentence-transformers over a small model with random weights: embeddings of padded batches, against sdpa."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sentences = pytest.importorskip("sentence_transformers")

import fulgurite  # noqa: E402

fulgurite.register_with_transformers()
TEXTS = ["a b c", "d e f g h a b c d e f g", "b", "a a a a b b b b c c c c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved BERT with a vocabulary of letters."""
    path = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "bert"
    return str(path)


def embedded(folder, implementation):
    kwargs = {"attn_implementation": implementation}
    model = sentences.SentenceTransformer(folder, device="cpu", model_kwargs=kwargs)
    assert model[0].auto_model.config._attn_implementation == implementation
    return model.encode(TEXTS, batch_size=3, convert_to_tensor=True, show_progress_bar=False)


def test_embeddings(folder):
    got, want = embedded(folder, "fulgurite"), embedded(folder, "sdpa")
    assert got.shape == (4, 32) and (want[0] - want[2]).abs().max() > 0.1
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
