"""Times torch's attention on the cells of `fulgurite bench`: JSON on stdin, JSON on stdout."""

import json
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

task = json.load(sys.stdin)
if task["threads"]:
    torch.set_num_threads(task["threads"])
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


for cell in task["cells"]:
    # The layout that torch prefers.
    shape = (cell["batch"], cell["heads"], cell["len"], cell["head_dim"])
    backward = cell["pass"] == "backward"
    dtype = DTYPES[cell["dtype"]]
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_(backward) for _ in range(3))
    causal = cell["mask"] == "causal"
    if backward:
        o = scaled_dot_product_attention(q, k, v, is_causal=causal)
        d_o = torch.randn_like(o)
        work = lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
    else:
        work = lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)
    with torch.set_grad_enabled(backward):
        work()
        cell["all_seconds"] = [seconds(work) for _ in cell["all_seconds"]]
json.dump({"version": torch.__version__, "cells": task["cells"]}, sys.stdout)
