"""Signatures reach type checkers: mypy --strict accepts a right client and names each mistake of a wrong one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fulgurite

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")

HEADER = """
from typing import Any
import fulgurite
from fulgurite import (
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention,
    scaled_dot_product_attention,
)

class Two:
    def tolist(self) -> list[int]:
        return [3, 1]

x: Any = None
"""
RIGHT = """
o = flash_attn_func(x, x, x, causal=True, window_size=(3, -1))
o = flash_attn_func(x, x, x, 0.0, None, None, [3, None])
o = flash_attn_func(x, x, x, window_size=Two())
o = flash_attn_varlen_func(x, x, x, x, x, 4, 4, causal=True, seqused_k=x)
o = flash_attn_with_kvcache(x, x, x, cache_seqlens=3, causal=False)
o = fulgurite.attention(x, x, x, causal="top-left", window=(3, None))
o = scaled_dot_product_attention(x, x, x, is_causal=True)
blocks = fulgurite.create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4)
o = flex_attention(x, x, x, block_mask=blocks)
share: float = blocks.sparsity()
fulgurite.register_with_transformers()
o = fulgurite.parallax_attention(x, x, x, x, causal=True)
o = fulgurite.attention(x, x, x, skip=fulgurite.Skip(["dense", "log"], top=0.5), precision="nvfp4")
o = fulgurite.sageattn(x, x, x, "NHD", is_causal=True)
cache = fulgurite.KvCache(2, 64, 4096, storage="packed", v_bits=[4, 2])
tokens: int = len(cache.fork())
o, lse = fulgurite.merge(x, x, x, x)
done: int = fulgurite.attention_counters(x, x, x, rescale="always").rescales_done
why = fulgurite.explain(x, x, x, causal=True)["engine"]
kept: int = fulgurite.skip_report(x, x, x, skip="log").kept
d_q, d_k, d_v = fulgurite.lighthouse_attention_backward(x, x, x, x, levels=2)
o, state = fulgurite.fla.chunk_gated_delta_rule(x, x, x, x, x, output_final_state=True)
o, state = fulgurite.fla.fused_recurrent_gated_delta_rule(x, x, x, x, beta=x, scale=0.5)
"""
WRONG = """
flash_attn_func(x, x, x, casual=True)
flash_attn_qkvpacked_func(x, casual=True)
flash_attn_varlen_func(x, x, x, casual=True)
flash_attn_with_kvcache(x, x, x, casual=True)
scaled_dot_product_attention(x, x, x, casual=True)
flex_attention(x, x, x, casual=True)
fulgurite.attention(x, x, x, casual=True)
fulgurite.attention(x, x, x, causal="bottom-left")
fulgurite.attention(x, x, x, window=3)
fulgurite.attention(x, x, x, window=(1.5, 2))
flash_attn_func(x, x, x, causal="yes")
flash_attn_func(x, x, x, window_size=3)
flash_attn_with_kvcache(x, x, x, window_size=(1.5, 2))
flash_attn_func(x, x)
fulgurite.fla.chunk_gated_delta_rule(x, x, x, x, x, l2norm=True)
fulgurite.parallax_attention(x, x, x, causal=True)
fulgurite.Skip(tile=64)
fulgurite.merge(x, x, x)
done: str = fulgurite.attention_counters(x, x, x).rescales_done
fulgurite.sageattn(x, x, x, causal=True)
fulgurite.KvCache(2, 64)
tokens: str = fulgurite.KvCache(2, 64, 8).capacity
fulgurite.lighthouse_attention(x, x, x, levels="two")
fulgurite.fla.chunk_gated_delta_rule(x, x, x, x, x, scale="big")
fulgurite.create_block_mask(3, None, None, 4, 4)
share: str = fulgurite.create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4).sparsity()
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    # Only fulgurite's own signatures are read: other packages would take most of the time.
    config = "[mypy]\nstrict = True\nwarn_unused_configs = False\n[mypy-fulgurite.*]\nfollow_imports = silent\n"
    for name in ("torch", "numpy", "transformers", "diffusers"):
        config += f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    (folder / "mypy.ini").write_text(config)

    def run(code):
        (folder / "client.py").write_text(HEADER + code)
        # A copy at its place in the path is a package with `py.typed`, as after installation.
        env = {**os.environ, "MYPYPATH": str(Path(fulgurite.__file__).parents[1])}
        command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "client.py"]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True).stdout

    return run


def test_a_right_client_passes(mypy):
    assert (Path(fulgurite.__file__).parent / "py.typed").exists()
    assert mypy(RIGHT).startswith("Success"), mypy(RIGHT)


def test_every_mistake_is_named(mypy):
    shown = mypy(WRONG)
    found = {int(line) for line in re.findall(r"^client\.py:(\d+): error", shown, re.M)}
    first = HEADER.count("\n") + 2
    missing = [line for at, line in enumerate(WRONG.strip().split("\n")) if first + at not in found]
    assert not missing, shown
    assert 'Unexpected keyword argument "casual" for "flash_attn_func"; did you mean "causal"?' in shown
