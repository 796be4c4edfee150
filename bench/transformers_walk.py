"""Every model of transformers that takes an attention interface, in a small random configuration, beside eager.

    python bench/transformers_walk.py [--only REGEX] [--seconds 90] [--out docs/lab/results/transformers-walk.txt]

Each model type is built as small as its configuration allows, once with `eager` (`sdpa` where that fails) and once with
`fulgurite`, with the same weights. Compared are the outputs without padding, with left and with right padding;
generation from left-padded prompts with a dynamic and with a static cache; and the gradients of one training step.
Attention weights are drawn with a variance that makes the scores matter. The exit status is 1 if a model is wrong.

A cell is `ok`, `WRONG` with the worst difference, `refused` (an error that names what is not supported), `ERROR`, or
`-`: the model cannot do this with its own attention either. Every model runs in a process with a time limit.
"""

import argparse
import collections
import copy
import json
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
CHECKS = ("none", "left", "right", "dynamic", "static", "train")
VOCABULARY, BATCH, LENGTH, MAX_PARAMETERS = 120, 3, 14, 100_000_000
# Values by the names of configuration entries. Later attempts leave some of them at their defaults.
SIZES = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "emb_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "n_inner": 96,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "num_hidden_groups": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "image_size": 32, "patch_size": 8, "num_codebooks": 2, "codebook_size": 64,
    "projection_dim": 64, "mm_hidden_size": 64, "out_hidden_size": 64, "embed_dim": 64,
}  # fmt: skip
FINER = {
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 6, "attention_window": 6,
}  # fmt: skip
# Entries of single types: layers with attention among two, and sizes that depend on others.
SPECIAL = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 6},
}
FEWER = {key: value for key, value in SIZES.items() if "layer" in key or key in ("vocab_size", "depth", "num_experts")}
ATTEMPTS = [
    {**SIZES, **FINER},
    SIZES,
    {**SIZES, "hidden_size": 128, "d_model": 128},
    {**SIZES, "num_key_value_heads": 4, "head_dim": 16},
    # Positions of several axes divide a head of 128.
    {**SIZES, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    {key: value for key, value in SIZES.items() if "image" not in key and "patch" not in key and "embed" not in key},
    FEWER,
    {},
]


def shrunk(config, sizes, kind):
    """Entries that make a configuration small, and those of the configurations inside it."""
    import transformers

    given = {}
    entries = {**config.to_dict(), **{key: getattr(config, key, None) for key in config.attribute_map}}
    for key, value in entries.items():
        if isinstance(getattr(type(config), key, None), property):
            continue  # follows from other entries
        try:
            inner = getattr(config, key, None)
        except Exception:  # differs from layer to layer
            continue
        if isinstance(inner, transformers.PreTrainedConfig):
            part = type(inner)(**shrunk(inner, sizes, kind))
            given[key] = part
        elif key in sizes and (isinstance(value, int) or value is None) and not isinstance(value, bool):
            if value is not None or key in ("num_key_value_heads", "vocab_size", "head_dim"):
                given[key] = sizes[key]
        elif isinstance(value, float) and ("dropout" in key or "pdrop" in key or "layerdrop" in key):
            given[key] = 0.0
        elif key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            given[key] = VOCABULARY - 10
        elif key.endswith(("layer_types", "block_type")) and isinstance(value, list) and "num_hidden_layers" in sizes:
            kinds = list(dict.fromkeys(value))
            given[key] = [kinds[at % len(kinds)] for at in range(sizes["num_hidden_layers"])]
    if sizes and kind == "decoder" and entries.get("is_decoder") is False:
        given["is_decoder"] = True
    if sizes:
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        given.update({key: value for key, value in ids.items() if key in entries})
        given.update(SPECIAL.get(config.model_type, {}))
    # An entry and its alias are one entry.
    for alias, name in config.attribute_map.items():
        if alias in given and name in given:
            del given[alias]
    return given


def classes(model_type):
    """The classes to test, by kind; the bare model only if no class has a head."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    found = {}
    for kind, mapping in (
        ("decoder", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("speech", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        ("encoder", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("base", auto.MODEL_MAPPING_NAMES),
    ):
        name = mapping.get(model_type)
        name = name[0] if isinstance(name, (tuple, list)) else name
        if name is not None and hasattr(transformers, name) and not (found and kind == "base"):
            found[kind] = getattr(transformers, name)
    return found


def inputs(model, kind, padding, generator, more=()):
    """The arguments of a call, and the positions whose outputs count. `more` names inputs beside the main one."""
    import torch

    config = model.config
    given, keep = {}, None
    for name in (model.main_input_name, *more):
        if name == "input_ids":
            ids = torch.randint(5, min(VOCABULARY - 20, 100), (BATCH, LENGTH), generator=generator)
            keep = torch.ones_like(ids)
            for row, count in enumerate((0, 3, 5)):
                if padding != "none":
                    part = slice(0, count) if padding == "left" else slice(LENGTH - count, LENGTH)
                    keep[row, part], ids[row, part] = 0, getattr(config, "pad_token_id", 0) or 0
            given["input_ids"] = ids
            if padding != "none":
                given["attention_mask"] = keep
        elif name == "decoder_input_ids":
            given[name] = torch.randint(5, 100, (BATCH, 6), generator=generator)
        elif name == "pixel_values":
            size = getattr(_part(config, "vision_config"), "image_size", 32)
            size = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
            channels = getattr(_part(config, "vision_config"), "num_channels", 3)
            given[name] = torch.randn(BATCH, channels, *size, generator=generator)
        elif name == "input_values":
            given[name] = torch.randn(BATCH, 4000, generator=generator)
        elif name == "input_features":
            part = _part(config, "audio_config")
            length = 2 * (getattr(part, "max_source_positions", None) or 50)
            given[name] = torch.randn(BATCH, getattr(part, "num_mel_bins", 80), length, generator=generator)
            if "transposed" in more:
                given[name] = given[name].transpose(1, 2).contiguous()
        elif name == "transposed":
            continue
        else:
            raise NotSmall(f"takes `{name}`, for which the walk has no input")
    if padding != "none" and "input_ids" not in given:
        return None, None
    return given, None if keep is None else keep.bool()


def _part(config, name):
    return getattr(config, name, config)


# Inputs beside the main one, until the model runs.
MORE = [(), ("decoder_input_ids",), ("pixel_values",), ("input_ids",), ("input_ids", "pixel_values"), ("transposed",)]


class NotSmall(Exception):
    """No small configuration of this model runs with its own attention."""


def drawn(model):
    """Draws weights whose scores differ from key to key."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            elif weight.ndim >= 3 and "embed" not in name:
                weight.normal_(0, weight[0].numel() ** -0.5, generator=generator)
            elif weight.ndim >= 2 and "embed" in name:
                weight.normal_(0, 0.5, generator=generator)
            elif name.endswith("sinks"):
                weight.normal_(0, 1, generator=generator)
    return model


def outputs(result, keep):
    """The main tensor of a result, at the positions that count."""
    tensor = None
    for name in (
        "logits",
        "last_hidden_state",
        "logits_per_image",
        "image_embeds",
        "reconstruction",
        "prediction_logits",
    ):
        tensor = getattr(result, name, None) if tensor is None else tensor
    if tensor is None:
        tensor = next(x for x in result.values() if hasattr(x, "shape") and x.is_floating_point())
    if keep is not None and tuple(tensor.shape[:2]) == tuple(keep.shape):
        return tensor[keep]
    return tensor


def difference(got, want):
    """The worst difference, as a share of what is allowed."""
    import torch

    if got.shape != want.shape:
        return float("inf")
    same = torch.isclose(got, want, rtol=0, atol=0, equal_nan=True)
    if same.all():
        return 0.0
    got, want = got.double()[~same], want.double()[~same]
    return float((got - want).abs().max() / (2e-4 + 1e-3 * want.abs().max()))


def built(model_type, cls, kind):
    """(the model with its own attention, its configuration, which attention that is, inputs beside the main one)."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reasons = []
    for sizes in ATTEMPTS:
        try:
            default = CONFIG_MAPPING[model_type]()
            config = type(default)(**shrunk(default, sizes, kind)) if sizes else default
            if cls.config_class is not type(config):  # the text part of a model of several
                parts = [getattr(config, key, None) for key in config.sub_configs]
                config = next((part for part in parts if type(part) is cls.config_class), config)
            with torch.device("meta"):
                count = sum(each.numel() for each in cls(copy.deepcopy(config)).parameters())
            if count > MAX_PARAMETERS:
                raise NotSmall(f"has {count / 1e6:.0f} million parameters")
            for own in ("eager", "sdpa"):
                try:
                    one = copy.deepcopy(config)
                    one._attn_implementation = own
                    theirs = drawn(cls(one).float().eval())
                except Exception as error:
                    reasons.append(shown(error))
                    continue
                for more in MORE:
                    try:
                        given, _ = inputs(theirs, kind, "none", torch.Generator().manual_seed(1), more)
                        with torch.no_grad():
                            result = outputs(theirs(**given), None)
                        if not result.isfinite().all():
                            raise NotSmall(f"its {own} attention gives NaN or infinity")
                        return theirs, config, own, more
                    except Exception as error:
                        reasons.append(shown(error))
        except Exception as error:
            reasons.append(shown(error))
    raise NotSmall(collections.Counter(reasons).most_common(1)[0][0])


def shown(error):
    text = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
    return text[:160]


def refusal(error):
    """Whether an error is ours and names what is not supported."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = any("fulgurite" in frame.filename for frame in frames[-3:])
    return ours and isinstance(error, (NotImplementedError, ValueError)) and str(error).startswith("`")


def checked(model_type):
    """The rows of a model type, one for each class."""
    found = classes(model_type)
    if not found:
        return [{**blank(model_type), "remark": "has no class that is built from its configuration alone"}]
    return [checked_class(model_type, cls, kind) for kind, cls in found.items()]


def blank(model_type):
    cells = dict.fromkeys(CHECKS, "-")
    return {"type": model_type, "class": "", "calls": 0, "remark": "", "state": "unbuilt", "cells": cells}


def checked_class(model_type, cls, kind):
    """One row of the table."""
    import torch
    from transformers import AttentionInterface

    import fulgurite.huggingface as ours

    torch.set_num_threads(1)
    row = {**blank(model_type), "class": cls.__name__}
    calls = collections.Counter()

    def counted(module, *args, **kwargs):
        calls[type(module).__name__] += 1
        return ours.attention_forward(module, *args, **kwargs)

    AttentionInterface.register("fulgurite", counted)
    try:
        theirs, config, own, more = built(model_type, cls, kind)
    except Exception as error:
        row["remark"] = str(error) if isinstance(error, NotSmall) else shown(error)
        return row
    remarks = [] if own == "eager" else [f"beside {own}"]
    try:
        mine = copy.deepcopy(config)
        mine._attn_implementation = "fulgurite"
        model = cls(mine).float().eval()
        model.load_state_dict(theirs.state_dict(), strict=False)
    except Exception as error:
        row["remark"], row["state"] = shown(error), "refused" if refusal(error) else "error"
        return row
    cells = row["cells"]
    for check in CHECKS:
        if check in ("dynamic", "static") and kind not in ("decoder", "seq2seq", "speech"):
            continue
        try:
            want = CHECK[check](theirs, kind, check, more)
        except Exception as error:
            if check in ("dynamic", "train"):
                remarks.append(f"{check}, own attention: {shown(error)[:60]}")
            continue
        if want is None:
            continue
        try:
            got = CHECK[check](model, kind, check, more)
            worst = compared(got, want)
            cells[check] = "ok" if worst <= 1 else f"WRONG {worst:.1f}"
            if worst > 1 and own == "eager":
                cells[check] = by_sdpa(cls, config, theirs, kind, check, more, got, cells[check])
        except Exception as error:
            cells[check] = "refused" if refusal(error) else "ERROR"
            remarks.append(f"{check}: {shown(error)}")
    row["calls"] = sum(calls.values())
    if not row["calls"]:
        row["state"] = "unasked"
    elif any(cell.startswith("WRONG") for cell in cells.values()):
        row["state"] = "wrong"
    elif "ERROR" in cells.values():
        row["state"] = "error"
    else:
        row["state"] = "refused" if "refused" in cells.values() else "ok"
    row["remark"] = "; ".join(remarks)
    return row


def compared(got, want):
    """The worst difference of two lists of tensors; tokens and logits count up to the first token that differs."""
    if len(got) != len(want):
        return float("inf")
    return max((difference(a, b) for a, b in zip(got, want)), default=0.0)


def by_sdpa(cls, config, theirs, kind, check, more, got, cell):
    """`ok` if the result is that of sdpa: eager attention of some models treats hidden rows in its own way."""
    other = copy.deepcopy(config)
    other._attn_implementation = "sdpa"
    try:
        model = cls(other).float().eval()
        model.load_state_dict(theirs.state_dict(), strict=False)
        worst = compared(got, CHECK[check](model, kind, check, more))
    except Exception:
        return cell
    return "ok (sdpa)" if worst <= 1 else cell


def prefill(model, kind, padding, more):
    import torch

    given, keep = inputs(model, kind, padding, torch.Generator().manual_seed(1), more)
    if given is None:
        return None
    torch.manual_seed(0)  # some models leave out parts of an image at random
    with torch.no_grad():
        return [outputs(model.eval()(**given), None if "decoder_input_ids" in given else keep)]


def generated(model, kind, cache, more):
    """The logits of each generated token up to the first that is nearly a tie: another rounding may choose another."""
    import torch

    padding = "left" if model.main_input_name == "input_ids" else "none"
    given, _ = inputs(model, kind, padding, torch.Generator().manual_seed(1), more)
    given.pop("decoder_input_ids", None)
    torch.manual_seed(0)
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    result = model.eval().generate(
        **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True,
        cache_implementation=None if cache == "dynamic" else cache, pad_token_id=0,
    )  # fmt: skip
    steps = list(result.logits)
    for at, logits in enumerate(steps):
        best = logits.topk(2, -1).values
        if (best[..., 0] - best[..., 1]).min() < 1e-3:
            return steps[: at + 1]
    return steps


def trained(model, kind, _, more):
    """Gradients of a weighted sum of the outputs, as shares of the largest one."""
    import numpy
    import torch

    padding = "right" if model.main_input_name == "input_ids" else "none"
    given, keep = inputs(model, kind, padding, torch.Generator().manual_seed(1), more)
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    numpy.random.seed(0)  # audio models mask at random
    result = outputs(model(**given), None if "decoder_input_ids" in given else keep)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    (result.float() * weights).mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    scale = max(float(each.abs().max()) for each in gradients.values())
    return [each / scale for _, each in sorted(gradients.items())]


CHECK = {
    "none": prefill,
    "left": prefill,
    "right": prefill,
    "dynamic": generated,
    "static": generated,
    "train": trained,
}


def worker(channel):
    """Checks the model types that arrive, until None does."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="critical")
    warnings.simplefilter("ignore")
    import transformers

    import fulgurite

    transformers.logging.set_verbosity(50)
    fulgurite.register_with_transformers()
    while (model_type := channel.recv()) is not None:
        channel.send(checked(model_type))


class Worker:
    """A process that is replaced when a model takes too long or ends it."""

    def __init__(self):
        self.process = None

    def rows(self, model_type, seconds):
        if self.process is None:
            self.channel, other = multiprocessing.Pipe()
            self.process = multiprocessing.get_context("spawn").Process(target=worker, args=(other,), daemon=True)
            self.process.start()
            other.close()
            seconds += 60
        self.channel.send(model_type)
        try:
            if self.channel.poll(seconds):
                return self.channel.recv()
            reason = f"took more than {seconds} s"
        except EOFError:
            reason = "ended the process"
        self.process.terminate()
        self.process = None
        return [{**blank(model_type), "remark": reason}]

    def close(self):
        if self.process is not None:
            self.channel.send(None)
            self.process.join()


TITLES = {
    "ok": "right in every check",
    "wrong": "WRONG",
    "error": "an error that is not a refusal",
    "refused": "refused by name, in some check or from the start",
    "unasked": "accepted, but no layer asked for the interface",
    "unbuilt": "not tested: no small configuration runs with the model's own attention, or it takes too long",
}


def report(rows, versions):
    """The table as text."""
    lines = [f"transformers {versions[0]}, torch {versions[1]}, fulgurite {versions[2]}; {__doc__.splitlines()[0]}", ""]
    counts = collections.Counter(row["state"] for row in rows)
    lines += [f"{counts[state]:4}  {title}" for state, title in TITLES.items()] + [""]
    for state, title in TITLES.items():
        chosen = [row for row in rows if row["state"] == state]
        if not chosen:
            continue
        lines += [f"## {title} ({len(chosen)})", ""]
        if state == "unbuilt" or state == "refused" and not any(row["calls"] for row in chosen):
            lines += [f"{row['type']:36} {row['class']:44} {row['remark']}" for row in chosen] + [""]
            continue
        lines.append(
            f"{'model type':36} {'class':44} {'calls':>5} " + " ".join(f"{name:>9}" for name in CHECKS) + "  remark"
        )
        for row in chosen:
            cells = " ".join(f"{row['cells'].get(name, '-'):>9}" for name in CHECKS)
            lines.append(f"{row['type']:36} {row['class']:44} {row['calls']:5} {cells}  {row['remark']}".rstrip())
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types that this regular expression matches")
    parser.add_argument("--seconds", type=int, default=90, help="time limit of one model")
    parser.add_argument("--out", type=Path, help="where the table goes")
    parser.add_argument("--rows", type=Path, help="a file that keeps finished rows: a walk that was stopped goes on")
    given = parser.parse_args()
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    import fulgurite

    types = [
        name for name in CONFIG_MAPPING_NAMES if name in {**MODEL_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    ]
    types = [name for name in types if re.search(given.only, name)]
    done = collections.defaultdict(list)
    if given.rows and given.rows.exists():
        for row in map(json.loads, given.rows.read_text().splitlines()):
            done[row["type"]].append(row)
    each = Worker()
    for at, model_type in enumerate(types):
        if model_type not in done:
            done[model_type] = each.rows(model_type, given.seconds)
            if given.rows:
                with given.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in done[model_type])
        for row in done[model_type]:
            cells = " ".join(f"{name}:{cell}" for name, cell in row["cells"].items() if cell != "-")
            print(
                f"{at + 1}/{len(types)} {model_type} {row['class']}: {row['state']} {cells} {row['remark']}", flush=True
            )
    each.close()
    rows = [row for name in types for row in done[name]]
    text = report(rows, (transformers.__version__, torch.__version__, fulgurite.__version__))
    print(text)
    if given.out:
        given.out.write_text(text)
    return 1 if any(row["state"] in ("wrong", "error") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
