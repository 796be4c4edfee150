"""`flash_attn_with_kvcache` on tensors of a Hopper GPU: the same as on the CPU, and lengths are never read back."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

from judge import close  # noqa: E402

import fulgurite  # noqa: E402


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def arguments(packed):
    angles = torch.arange(64)[:, None] / 50.0 ** (torch.arange(16) / 16)
    given = {
        "q": draw(5, 4, 64) if packed else draw(2, 3, 4, 64),
        "k_cache": draw(4, 64, 2, 64), "v_cache": draw(4, 64, 2, 64),
        "k": draw(4, 2, 64) if packed else draw(2, 3, 2, 64), "v": draw(4, 2, 64) if packed else draw(2, 3, 2, 64),
        "rotary_cos": torch.cos(angles).bfloat16(), "rotary_sin": torch.sin(angles).bfloat16(),
        "cache_seqlens": torch.tensor([7, 40], dtype=torch.int32),
        "cache_leftpad": torch.tensor([2, 5], dtype=torch.int32),
        "cache_batch_idx": torch.tensor([3, 1], dtype=torch.int32),
    }  # fmt: skip
    if packed:
        given["cu_seqlens_q"] = torch.tensor([0, 4, 5], dtype=torch.int32)
        given["cu_seqlens_k_new"] = torch.tensor([0, 1, 4], dtype=torch.int32)
    return given


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_as_on_the_cpu(packed, causal):
    here = arguments(packed)
    there = {name: x.cuda() for name, x in here.items()}
    got = fulgurite.flash_attn_with_kvcache(**there, causal=causal, max_seqlen_q=4)
    want = fulgurite.flash_attn_with_kvcache(**here, causal=causal, max_seqlen_q=4)
    close(got, want)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(there[name].cpu(), here[name]), name


@pytest.mark.parametrize("packed", [False, True])
def test_numbers_are_not_read_back(packed):
    given = {name: x.cuda() for name, x in arguments(packed).items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        fulgurite.flash_attn_with_kvcache(**given, causal=True, max_seqlen_q=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_refused_call_writes_nothing():
    given = {name: x.cuda() for name, x in arguments(False).items()}
    before = given["k_cache"].clone(), given["v_cache"].clone()
    for changed in ({"softmax_scale": -1.0}, {"alibi_slopes": torch.ones(3, device="cuda")}, {"softcap": -2.0}):
        with pytest.raises(ValueError):
            fulgurite.flash_attn_with_kvcache(**given, **changed)
        assert torch.equal(given["k_cache"], before[0]) and torch.equal(given["v_cache"], before[1])
