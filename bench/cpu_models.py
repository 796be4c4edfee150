"""A padded BERT-base and a padded Llama on the CPU: transformers with our attention beside its sdpa, end to end.

    python bench/cpu_models.py                              both models, both lengths, f32 and bf16
    python bench/cpu_models.py --models bert --dtypes f32

Four layers with random weights; 8 x 128 and 4 x 512 tokens, of which each later sequence has fewer (BERT is padded on the right, Llama
on the left). One process; the same weights; the two implementations take turns. `sdpa` is its time over ours: above 1 we are faster. Last
hidden states are compared first, over the tokens that are not padding.
"""

import argparse
import copy
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "python")]

import fulgurite  # noqa: E402
from race import Contender, Steal, race  # noqa: E402
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# Largest differences of hidden states, as shares of the largest element.
TOLERANCE = {"f32": 1e-3, "bf16": 5e-2}
SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def bert():
    """BERT-base but for the number of layers."""
    return BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False)


def llama():
    """The width of a Llama of a billion parameters."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=1000, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config)


MODELS = {"bert": (bert, "right"), "llama": (llama, "left")}


def cell(args, name, dtype, batch, tokens):
    make, side = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().to(DTYPES[dtype])
    ids = torch.randint(1, 900, (batch, tokens))
    lengths = torch.tensor([tokens - i * tokens // (2 * batch) for i in range(batch)])
    places = torch.arange(tokens)[None, :]
    keep = places < lengths[:, None] if side == "right" else places >= tokens - lengths[:, None]
    mask = keep.long()
    models = {}
    for way in ("sdpa", "fulgurite"):
        models[way] = copy.deepcopy(model)
        models[way].set_attn_implementation(way)
    states = {way: own(ids, attention_mask=mask).last_hidden_state.float() for way, own in models.items()}
    away = (states["sdpa"] - states["fulgurite"])[keep].abs().max()
    if not away <= TOLERANCE[dtype] * states["sdpa"][keep].abs().max():
        sys.exit(f"{name} {dtype} {batch} x {tokens}: hidden states differ by {away}")
    calls = [
        Contender(way, lambda own=own: own(ids, attention_mask=mask) is None or None) for way, own in models.items()
    ]
    taken = {way: found["median_s"] for way, found in race(calls, args.seconds, 5).items()}
    ratio = taken["sdpa"] / taken["fulgurite"]
    print(f"{name:6} {dtype:5}{batch:3} x{tokens:4} {taken['fulgurite'] * 1e3:9.1f} ms {ratio:6.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="per cell")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    fulgurite.register_with_transformers()
    found = " ".join(name for name in SETS if name in pathlib.Path("/proc/cpuinfo").read_text().split())
    print(f"torch {torch.__version__}, {args.threads} threads, instruction sets: {found}")
    print(f"{'':22}{'ours':>9}    {'sdpa':>6}")
    steal = Steal()
    for name in args.models:
        for dtype in args.dtypes:
            for batch, tokens in ((8, 128), (4, 512)):
                cell(args, name, dtype, batch, tokens)
    print(f"steal {steal.share():.0%}")


if __name__ == "__main__":
    main()
