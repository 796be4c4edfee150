"""`attn_implementation="fulgurite"` in small models with random weights, against eager and sdpa."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fulgurite  # noqa: E402

fulgurite.register_with_transformers()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What each model brings beside grouped heads.
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 6,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gpt_oss": ("GptOss", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# sdpa has neither softcap nor sinks.
PEERS = {"gemma2": "eager", "gpt_oss": "eager"}


def model(name, implementation="fulgurite"):
    family, options = MODELS[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options, "attention_dropout": 0.0})
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    made.set_attn_implementation(implementation)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    return made


def pair(name):
    ours, theirs = model(name), model(name, PEERS.get(name, "sdpa"))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def padded(side, batch=3, length=17):
    ids = torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 3, 6)):
        part = slice(0, count) if side == "left" else slice(length - count, length)
        mask[row, part], ids[row, part] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill(name, side):
    ours, theirs = pair(name)
    batch = padded(side)
    if side == "none":
        batch["attention_mask"] = None
    with torch.no_grad():
        got, want = ours.eval()(**batch).logits, theirs.eval()(**batch).logits
    keep = torch.ones(got.shape[:2], dtype=torch.bool) if side == "none" else batch["attention_mask"].bool()
    torch.testing.assert_close(got[keep], want[keep], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name, cache):
    ours, theirs = pair(name)
    batch = {**padded("left"), "cache_implementation": cache}
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    got, want = (each.eval().generate(**batch, **options) for each in (ours, theirs))
    assert (got.sequences == want.sequences).all()
    for a, b in zip(got.logits, want.logits):
        torch.testing.assert_close(a, b, atol=5e-4, rtol=1e-3)


def trained(each, batch, steps=4):
    """The losses of a few steps."""
    optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = each.train()(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    ours, theirs = pair(name)
    batch = padded("right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = [trained(each, batch) for each in (ours, theirs)]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-3, rtol=1e-3)
    gradients = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        wanted = gradients[parameter_name].grad
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, atol=1e-3, rtol=1e-2)


def test_bf16_gradient_checkpointing():
    ours, theirs = (each.to(torch.bfloat16) for each in pair("llama"))
    ours.gradient_checkpointing_enable()
    batch = padded("right")
    losses = [each.train()(**batch, labels=batch["input_ids"]).loss for each in (ours, theirs)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, atol=5e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compile(name):
    torch._dynamo.reset()
    ours, theirs = pair(name)
    batch = padded("right")
    with torch.no_grad():
        compiled = torch.compile(ours.eval(), backend="aot_eager")
        got, want = compiled(**batch, use_cache=False).logits, theirs.eval()(**batch).logits
    keep = batch["attention_mask"].bool()
    torch.testing.assert_close(got[keep], want[keep], atol=2e-4, rtol=1e-3)


def test_no_dense_mask_is_made():
    """What reaches the layers is an expression and the padding, not [q_len, k_len] booleans."""
    from fulgurite.capture import TracedMask
    from fulgurite.huggingface import attention_mask_for

    masks = transformers.masking_utils
    mask = attention_mask_for(2, 1, 9, 8, 0, masks.causal_mask_function, torch.tensor([[0] + [1] * 8, [1] * 9]).bool())
    assert isinstance(mask, TracedMask)
    assert mask.text == "and le k add q sub k_len q_len not eq load padding_mask 2 b k i0"
    assert [tuple(array.shape) for _, array in mask.tracer.captured()] == [(2, 9)]
    later = attention_mask_for(2, 1, 10, 9, 0, masks.causal_mask_function, None)
    assert later.text == "le k add q sub k_len q_len"


def test_a_traced_mask_stands_for_a_tensor():
    """Models may read, index and add the mask that they are handed."""
    from fulgurite.huggingface import attention_mask_for

    masks = transformers.masking_utils
    mask = attention_mask_for(2, 3, 5, 2, 0, masks.causal_mask_function, None, device=torch.device("cpu"))
    want = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert mask.ndim == 4 and mask.dtype == torch.bool and mask.contiguous().shape[-2:] == (3, 5)
    assert (mask[..., 1:] == want[:, 1:]).all()
    bias = torch.randn(2, 4, 3, 5)
    for got in (bias + mask, mask + bias, torch.add(bias, mask), torch.add(input=bias, other=mask)):
        assert (got[..., want] == bias[..., want]).all() and (got[..., ~want] < -1e30).all()
    assert ((mask == 0) == ~want).all() and (~mask == ~want).all() and (mask + 1 == want.long() + 1).all()
    assert torch.cat([mask, torch.ones(2, 1, 3, 1, dtype=torch.bool)], -1).shape == (2, 1, 3, 6)


def test_what_is_refused():
    attention_forward = transformers.AttentionInterface()["fulgurite"]
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="set attention_dropout=0.0"):
        attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1)
    with pytest.raises(ValueError, match="`output_attentions` is True"):
        attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match="paged caches"):
        attention_forward(torch.nn.Module(), q, q, q, None, cache=object())
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(NotImplementedError, match=f"`{name}` is a tensor that Module hands"):
            attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(2)})
    o, _ = attention_forward(torch.nn.Module(), q, q, q, None, position_ids=torch.arange(4)[None], indices=None)
    assert o.shape == (1, 4, 2, 8)


def test_models_that_compute_their_own_attention_are_named():
    small = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for family, config in (("Falcon", small), ("Bloom", small), ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 1})):
        config = getattr(transformers, f"{family}Config")(**config)
        config._attn_implementation = "fulgurite"
        with pytest.raises(ValueError, match=f"`attn_implementation` is 'fulgurite', but {family}\\w+ "):
            getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.raises(ValueError, match="looks its attention up in a table of its own"):
        config = transformers.SamVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32)
        config._attn_implementation = "fulgurite"
        transformers.SamVisionModel(config)
    model("llama")  # and others are not, nor are models without attention
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32)
    config._attn_implementation = "fulgurite"
    transformers.ConvNextModel(config)


def test_masks_for_other_lengths():
    """A layer may keep fewer keys than its mask has; more keys are not masked by it."""
    from fulgurite.huggingface import attention_forward, attention_mask_for

    masks = transformers.masking_utils
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 6, 8)
    mask = attention_mask_for(2, 3, 5, 2, 0, masks.causal_mask_function, None, device=torch.device("cpu"))
    got, _ = attention_forward(torch.nn.Module(), q, k[:, :, :4], k[:, :, :4], mask)
    want, _ = attention_forward(torch.nn.Module(), q, k[:, :, :4], k[:, :, :4], mask.dense()[..., :4])
    assert torch.equal(got, want)
    with pytest.raises(
        NotImplementedError, match="`attention_mask` is for 3 queries and 5 keys, but Module has 3 queries and 6"
    ):
        attention_forward(torch.nn.Module(), q, k, k, mask)
    with pytest.raises(NotImplementedError, match="but Module has 2 queries"):
        attention_forward(torch.nn.Module(), q[:, :, :2], k[:, :, :5], k[:, :, :5], mask)


def test_keys_of_any_strides():
    from fulgurite.huggingface import attention_forward

    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 6).transpose(2, 3)
    got, _ = attention_forward(torch.nn.Module(), q, k, k, is_causal=False)
    want, _ = attention_forward(torch.nn.Module(), q, k.contiguous(), k.contiguous(), is_causal=False)
    assert torch.equal(got, want)
