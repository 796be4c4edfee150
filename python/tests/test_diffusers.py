"""`set_attention_backend("fulgurite")` in small diffusers models with random weights, against the native backend."""

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import fulgurite  # noqa: E402
from fulgurite.huggingface import diffusers_attention  # noqa: E402

diffusers.utils.logging.set_verbosity_error()
fulgurite.register_with_diffusers()


@pytest.fixture(autouse=True)
def native_afterwards():
    """The active backend is one for the whole process."""
    yield
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def flux():
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def test_flux(monkeypatch):
    model, calls = flux(), []
    generator = torch.Generator().manual_seed(1)
    given = {
        "hidden_states": torch.randn(1, 16, 4, generator=generator, requires_grad=True),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    results = []
    for backend in ("native", "fulgurite"):
        model.set_attention_backend(backend)
        from fulgurite import huggingface

        plain = huggingface.scaled_dot_product_attention
        monkeypatch.setattr(
            huggingface, "scaled_dot_product_attention", lambda *a, **b: calls.append(backend) or plain(*a, **b)
        )
        out = model(**given).sample
        results.append((out, torch.autograd.grad(out.square().sum(), given["hidden_states"])[0]))
        monkeypatch.undo()
    assert calls == ["fulgurite"] * 2  # one call of each block
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)


def test_masks_and_what_is_refused():
    q, k, v = (torch.randn(2, n, 3, 8) for n in (5, 7, 7))
    keep = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    swap = lambda x: x.transpose(1, 2)
    want = fulgurite.scaled_dot_product_attention(swap(q), swap(k), swap(v), keep[:, None, None])
    assert torch.equal(swap(diffusers_attention(q, k, v, keep)), want)
    with pytest.raises(NotImplementedError, match="`return_lse` is True, allowed: False"):
        diffusers_attention(q, k, v, return_lse=True)
    with pytest.raises(NotImplementedError, match="`parallel_config` is "):
        diffusers_attention(q, k, v, _parallel_config=object())
    with pytest.raises(ValueError, match="`attn_mask` has shape"):
        diffusers_attention(q, k, v, keep[:, :6])


def test_a_model_without_backends_is_named():
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, mid_block_add_attention=False)
    with pytest.raises(ValueError, match="no layer of AutoencoderKL asks for an attention backend"):
        model.set_attention_backend("fulgurite")
    model.set_attention_backend("native")
