"""Attention on one GPU beside its peers: torch SDPA (cuDNN, FlashAttention-2), FlashAttention-4, FlexAttention.

    python python/build.py && python bench/gpu.py [grid] [backward] [decode] [features] [varlen] [cold] [sustained] [models] [shapes] [--json FILE]

Everything runs in one process, contenders alternating, medians of rounds. Each cell is compared with float64 on random
rows first. FlashAttention-4 takes part where `flash_attn.cute` can be imported, FlashAttention-3 where
`flash_attn_interface` can, and with --sketch FOLDER a generator of kernels by hand.
"""

import argparse
import ctypes
import functools
import json
import math
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
import gpu_models  # noqa: E402
from gpu_race import event, race  # noqa: E402

TOKENS, WIDTH = 16384, 2048
SEQS = (512, 1024, 2048, 4096, 8192, 16384)
BF16 = torch.bfloat16


def say(text):
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------- clocks
class Meter:
    """Clock (MHz) and power (W) while a block runs, read by NVML."""

    def __init__(self):
        self.library, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.library.nvmlInit_v2()
        self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def __enter__(self):
        self.samples, self.going = [], True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        while self.going:
            self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(clock))
            self.library.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(power))
            self.samples.append((clock.value, power.value / 1000))
            time.sleep(0.01)

    def __exit__(self, *_):
        self.going = False
        self.thread.join()

    def mean(self):
        late = self.samples[len(self.samples) // 3 :] or [(0, 0.0)]
        return tuple(sum(sample[i] for sample in late) / len(late) for i in (0, 1))


# ---------------------------------------------------------------------------------------------- peers
def sdpa(backend, q, k, v, causal=False):
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return call


def flash4():
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # whatever keeps it from being imported, it does not take part
        say(f"FlashAttention-4 does not take part: {error!r}")
        return None
    return flash_attn_func


def flash3():
    """FlashAttention-3: its own package, or the extension that vLLM builds of it, which has no gradients."""
    try:
        from flash_attn_interface import flash_attn_func

        return flash_attn_func
    except ImportError:
        pass
    try:
        from peer_fa3 import fwd
    except ImportError:
        say("FlashAttention-3 does not take part: neither `flash_attn_interface` nor `peer_fa3` is installed")
        return None

    @functools.cache
    def offsets(batch, length):
        return torch.arange(0, (batch + 1) * length, length, device="cuda", dtype=torch.int32)

    def forward(q, k, v, causal=False, softcap=0.0, window_size=(-1, -1), num_splits=1):
        """Sequences of equal length as a packed batch: that extension has no other kernels."""
        batch, m, n = q.shape[0], q.shape[1], k.shape[1]
        packed = (x.flatten(0, 1) for x in (q, k, v))
        before = (None,) * 4 + (offsets(batch, m), offsets(batch, n)) + (None,) * 3 + (m, n) + (None,) * 6
        after = (None, num_splits, None, 0, None, 1, 0, None)
        o = fwd(*packed, *before, None, None, None, q.shape[-1] ** -0.5, causal, *window_size, softcap, True, *after)[0]
        return o.view(batch, m, *o.shape[1:])

    return forward


def first(result):
    return result[0] if isinstance(result, tuple) else result


def sketch(folder):
    """Launchers of the hand-written generator, by (q, k, v, causal)."""
    if folder is None:
        return None
    sys.path.insert(0, str(folder))
    import attn

    def make(q, k, v, causal):
        o, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
        launch = attn.launcher(attn.pick(q.shape[3], q.shape[1], causal), q, k, v, o, lse)

        def call():
            launch()
            return o

        return call

    return make


def sketch_backward(folder):
    """Launchers of its gradients, by (q, k, v, o, lse, d_o, causal)."""
    if folder is None:
        return None
    import bwd

    def make(q, k, v, o, lse, d_o, causal):
        if q.shape[3] > 128:
            return None
        results = tuple(torch.empty_like(x) for x in (q, k, v))
        return bwd.launcher(bwd.pick(q.shape[3]), causal, q, k, v, o, d_o, lse, *results)

    return make


# ---------------------------------------------------------------------------------------------- correctness
def error(o, q, k, v, causal=False, window=None, rows=64, seed=1):
    """Relative error of random rows against float64."""
    b, n, h, d = q.shape
    m, group = k.shape[1], h // k.shape[2]
    generator = torch.Generator().manual_seed(seed)
    worst_difference = worst_size = 0.0
    for _ in range(rows):
        i, j, r = (int(torch.randint(size, (1,), generator=generator)) for size in (b, h, n))
        keys, values = (x[i, :, j // group].double() for x in (k, v))
        scores = keys @ q[i, r, j].double() / math.sqrt(d)
        place = torch.arange(m, device=q.device) - (r + m - n)
        if causal:
            scores = scores.masked_fill(place > 0, -math.inf)
        if window is not None:
            scores = scores.masked_fill((place > 0) | (place < -window), -math.inf)
        want = torch.softmax(scores, 0) @ values
        difference = (o[i, r, j].double() - want).norm().item()
        worst_difference, worst_size = worst_difference + difference**2, worst_size + want.norm().item() ** 2
    return math.sqrt(worst_difference / worst_size)


def tensors(b, n, h, d, m=None, h_kv=None, dtype=BF16):
    shapes = ((b, n, h, d), (b, m or n, h_kv or h, d), (b, m or n, h_kv or h, d))
    return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes)


def ours(q, k, v, **options):
    out = torch.empty(*q.shape[:-1], v.shape[-1], device="cuda", dtype=q.dtype)
    return functools.partial(fulgurite.attention, q, k, v, out=out, **options)


# ---------------------------------------------------------------------------------------------- parts
def product_rate():
    a, b = (torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(2))
    ms = race({"product": functools.partial(torch.matmul, a, b)}, 10)["product"]
    return 2 * 8192**3 / ms / 1e9


def grid(options, peers):
    rows = []
    product = product_rate()
    say(f"TFLOP/s; an 8192^3 product: {product:.0f}; share is ours of it; best is the best of cuDNN, FA4 and FA3")
    for d in options.dims:
        for causal in (False, True):
            for n in options.seqs:
                q, k, v = tensors(TOKENS // n, n, WIDTH // d, d)
                calls = {"ours": ours(q, k, v, causal=causal), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
                if d <= 256:
                    calls["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal)
                for name in ("fa4", "fa3"):
                    if peers[name]:
                        calls[name] = functools.partial(peers[name], q, k, v, causal=causal)
                if peers["sketch"]:
                    calls["sketch"] = peers["sketch"](q, k, v, causal)
                wrong = error(calls["ours"](), q, k, v, causal)
                ms = race(calls, options.rounds)
                flops = 4 * q.numel() * n * (0.5 if causal else 1.0)
                rate = {name: flops / t / 1e9 for name, t in ms.items()}
                best = max(rate[name] for name in ("cudnn", "fa4", "fa3") if name in rate)
                row = {"d": d, "causal": causal, "n": n, "tflops": rate, "ratio": rate["ours"] / best, "error": wrong}
                row["share"] = rate["ours"] / product
                if "sketch" in rate:
                    row["to_sketch"] = rate["ours"] / rate["sketch"]
                rows.append(row)
                text = " ".join(f"{name} {x:.0f}" for name, x in rate.items())
                against = f", sketch {row['to_sketch']:.3f}" if "sketch" in rate else ""
                say(f"d {d} {'causal' if causal else 'full'} {n}: {text}; best {row['ratio']:.3f}{against}, share {row['share']:.2f}, error {wrong:.1e}")
    mean = math.exp(statistics.mean(math.log(row["ratio"]) for row in rows))
    say(f"geometric mean over the best peer {mean:.3f}, smallest {min(row['ratio'] for row in rows):.3f}; worst error {max(row['error'] for row in rows):.1e}")
    return {"rows": rows, "product": product, "geometric_mean": mean}


def gradient_calls(peers, q, k, v, d_o, causal):
    """Who computes gradients of these tensors, each as a call."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def gradients(o):
        return functools.partial(torch.autograd.grad, o, leaves, d_o, retain_graph=True)

    o, lse = fulgurite.attention(q, k, v, causal=causal, return_lse=True)
    out = tuple(torch.empty_like(x) for x in (q, k, v))
    calls = {
        "ours": functools.partial(fulgurite.attention_backward, d_o, q, k, v, o, lse, causal=causal, out=out),
        "cudnn": gradients(sdpa(SDPBackend.CUDNN_ATTENTION, *leaves, causal)()),
    }
    if peers["fa4"]:
        try:
            calls["fa4"] = gradients(first(peers["fa4"](*leaves, causal=causal)))
            calls["fa4"]()
        except Exception as failure:  # a peer that cannot do it does not take part
            say(f"  fa4 does not take part: {str(failure).splitlines()[0][:120]}")
            del calls["fa4"]
    if peers["sketch_backward"]:
        made = peers["sketch_backward"](q, k, v, o, lse, d_o, causal)
        if made is not None:
            calls["sketch"] = made
    return calls


def backward(options, peers):
    """Gradients, what is before and after the main kernel included."""
    rows = []
    for d in options.dims:
        for causal in (False, True):
            for n in (1024, 4096, 16384):
                q, k, v = tensors(TOKENS // n, n, WIDTH // d, d)
                d_o = torch.randn_like(q)
                calls = gradient_calls(peers, q, k, v, d_o, causal)
                want = gradient_reference(q, k, v, d_o, causal)
                got = calls["ours"]()
                wrong = max(((g[0, :, :1].double() - w).norm() / w.norm()).item() for g, w in zip(got, want))
                ms = race(calls, options.rounds)
                flops = 10 * q.numel() * n * (0.5 if causal else 1.0)
                rate = {name: flops / t / 1e9 for name, t in ms.items()}
                best = max(rate[name] for name in ("cudnn", "fa4") if name in rate)
                row = {"d": d, "causal": causal, "n": n, "tflops": rate, "ratio": rate["ours"] / best, "error": wrong}
                rows.append(row)
                text = " ".join(f"{name} {x:.0f}" for name, x in rate.items())
                against = f", sketch {rate['ours'] / rate['sketch']:.3f}" if "sketch" in rate else ""
                say(f"backward d {d} {'causal' if causal else 'full'} {n}: {text}; best {row['ratio']:.3f}{against}, error {wrong:.1e}")
                del calls, want, got
    return {"rows": rows}


def gradient_reference(q, k, v, d_o, causal):
    """Gradients of the first head of the first sequence in float64, by blocks of rows."""
    q, k, v, d_o = (x[0, :, 0].double() for x in (q, k, v, d_o))
    n, scale = q.shape[0], q.shape[1] ** -0.5
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, n, 2048):
        rows = slice(start, min(n, start + 2048))
        scores = q[rows] @ k.mT * scale
        if causal:
            place = torch.arange(n, device=q.device)
            scores = scores.masked_fill(place > place[rows, None], -math.inf)
        p = torch.softmax(scores, -1)
        d_p = d_o[rows] @ v.mT
        d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * scale
        d_q[rows] = d_s @ k
        d_k += d_s.mT @ q[rows]
        d_v += p.mT @ d_o[rows]
    return tuple(x[:, None] for x in (d_q, d_k, d_v))


def decode(options, peers):
    rows = []
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / race({"copy": lambda: target.copy_(source)}, 10)["copy"] / 1e6
    say(f"decode: GB/s of K and V; copies run at {copy:.0f} GB/s (read + written)")
    for batch in (1, 8, 32):
        for keys in (8192, 65536):
            for queries in (1, 4, 16):
                q, k, v = tensors(batch, queries, 32, 128, keys, 8)
                calls = {"ours": ours(q, k, v, causal=True)}
                # torch aligns its causal mask top-left: its peers see every key instead, which is no less work.
                calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v)
                if peers["fa4"]:
                    calls["fa4"] = functools.partial(peers["fa4"], q, k, v, causal=True)
                if peers["fa3"]:  # 0: as many splits as it finds best
                    calls["fa3"] = functools.partial(peers["fa3"], q, k, v, causal=True, num_splits=0)
                if peers["flex"]:
                    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
                    calls["flex"] = functools.partial(peers["flex"], qt, kt, vt, enable_gqa=True)
                wrong = error(calls["ours"](), q, k, v, True)
                ms = {}
                for name in list(calls):
                    try:
                        calls[name]()
                        torch.cuda.synchronize()
                    except Exception as failure:  # a peer that cannot do it does not take part
                        say(f"  {name} does not take part: {str(failure).splitlines()[0][:120]}")
                        del calls[name]
                ms = race(calls, options.rounds)
                data = 2 * k.numel() * 2
                rate = {name: data / t / 1e6 for name, t in ms.items()}
                best = max((x for name, x in rate.items() if name != "ours"), default=math.nan)
                rows.append({"batch": batch, "keys": keys, "queries": queries, "gbps": rate, "us": {n: t * 1e3 for n, t in ms.items()}, "ratio": rate["ours"] / best, "of_copy": rate["ours"] / copy, "error": wrong})
                text = " ".join(f"{name} {x:.0f} ({ms[name] * 1e3:.0f} us)" for name, x in rate.items())
                say(f"batch {batch} keys {keys} queries {queries}: {text}; best {rate['ours'] / best:.3f}, of copy {rate['ours'] / copy:.2f}, error {wrong:.1e}")
                del q, k, v, calls
    return {"rows": rows, "copy_gbps": copy}


def features(options, peers):
    rows = []
    for d in (64, 128):
        q, k, v = tensors(1, 16384, WIDTH // d, d)
        plain = {causal: ours(q, k, v, causal=causal) for causal in (False, True)}
        slopes = torch.rand(WIDTH // d, device="cuda")
        cap = 30.0
        calls = {
            "plain": plain[False],
            "causal": plain[True],
            "softcap": ours(q, k, v, softcap=cap),
            "softcap as expression": ours(q, k, v, score_mod=lambda s, b, h, i, j: cap * (s / cap).tanh()),
            "alibi causal": ours(q, k, v, causal=True, alibi_slopes=slopes),
            "alibi as expression": ours(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()),
            "sinks causal": ours(q, k, v, causal=True, sinks=torch.randn(WIDTH // d, device="cuda")),
            "window 1024": ours(q, k, v, window=(1023, 0)),
        }
        if peers["flex"]:
            from torch.nn.attention.flex_attention import create_block_mask

            near = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 1023), None, None, 16384, 16384, device="cuda")
            qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
            calls["flex window 1024"] = functools.partial(peers["flex"], qt, kt, vt, block_mask=near)
        wrong = error(calls["window 1024"](), q, k, v, window=1023)
        ms = race(calls, options.rounds)
        row = {"d": d, "ms": ms, "window_error": wrong}
        for name, base in (("softcap", "plain"), ("softcap as expression", "plain"), ("alibi causal", "causal"), ("alibi as expression", "causal"), ("sinks causal", "causal")):
            row[f"{name} / {base}"] = ms[name] / ms[base]
        if "flex window 1024" in ms:
            row["flex window / ours"] = ms["flex window 1024"] / ms["window 1024"]
        rows.append(row)
        say(f"d {d}, 16384: " + ", ".join(f"{name} {t:.3f} ms" for name, t in ms.items()))
        say("   " + ", ".join(f"{name} {x:.3f}" for name, x in row.items() if isinstance(x, float)))
    return {"rows": rows}


def varlen(options, peers):
    """A mix of lengths from 64 to 16384, 32768 tokens; compared with the rates of dense batches of those lengths."""
    lengths = [16384, 4096, 3072, 2048, 2048, 1536, 1024, 1024, 512, 512, 256, 128, 64, 64]
    assert sum(lengths) == 32768, sum(lengths)
    rows = []
    for d in (64, 128):
        heads = WIDTH // d
        for causal in (False, True):
            offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
            q, k, v = (torch.randn(32768, heads, d, device="cuda").to(BF16) for _ in range(3))
            out = torch.empty_like(q)
            calls = {"packed": functools.partial(fulgurite.attention, q, k, v, causal=causal, cu_seqlens=(offsets, offsets), out=out)}
            for n in sorted(set(lengths)):
                x, y, z = tensors(max(1, TOKENS // n), n, heads, d)
                calls[n] = ours(x, y, z, causal=causal)
            o = calls["packed"]()
            wrong = max(
                error(o[a:b][None], q[a:b][None], k[a:b][None], v[a:b][None], causal, rows=16)
                for a, b in zip(offsets.tolist(), offsets.tolist()[1:])
            )
            ms = race(calls, options.rounds)
            half = 0.5 if causal else 1.0
            flops = {n: 4 * n * n * WIDTH * half for n in lengths}
            total = sum(flops[n] for n in lengths)
            # The time that dense batches would take for the same work.
            dense = sum(flops[n] / (flops[n] * max(1, TOKENS // n) / ms[n]) for n in lengths)
            ratio = dense / ms["packed"]
            rows.append({"d": d, "causal": causal, "tflops": total / ms["packed"] / 1e9, "of_dense": ratio, "error": wrong})
            say(f"varlen d {d} {'causal' if causal else 'full'}: {total / ms['packed'] / 1e9:.0f} TFLOP/s, {ratio:.3f} of the dense rate, error {wrong:.1e}")
    return {"lengths": lengths, "rows": rows}


def cold(options, peers):
    """From nothing to a result, and what a call costs the host."""
    q, k, v = tensors(1, 1024, 16, 72)
    start = time.perf_counter()
    fulgurite.attention(q, k, v)
    torch.cuda.synchronize()
    new = time.perf_counter() - start
    q, k, v = tensors(1, 128, 16, 128)
    out = torch.empty_like(q)
    call = functools.partial(fulgurite.attention, q, k, v, out=out)
    call()
    torch.cuda.synchronize()
    hosts = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            call()
        hosts.append((time.perf_counter() - start) / 100)
        torch.cuda.synchronize()
    peer = sdpa(SDPBackend.FLASH_ATTENTION, q, k, v)
    peers_host = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            peer()
        peers_host.append((time.perf_counter() - start) / 100)
        torch.cuda.synchronize()
    say(f"cold: a new shape {new:.2f} s; a call of a known one {statistics.median(hosts) * 1e6:.1f} us of the host (torch SDPA {statistics.median(peers_host) * 1e6:.1f} us)")
    found = {"new_shape_s": new, "host_us": statistics.median(hosts) * 1e6, "sdpa_host_us": statistics.median(peers_host) * 1e6}
    for kind, ours_us, sdpa_us in new_lengths():
        say(f"cold: {kind} of a length that is new {ours_us:.0f} us of the host (torch SDPA {sdpa_us:.0f} us)")
        found[kind] = {"new_length_us": ours_us, "sdpa_new_length_us": sdpa_us}
    return found


def new_lengths():
    """Microseconds of the host for calls whose lengths never came before: a cache that grows by a key a step, prompts, and the
    gradients of such a prompt."""
    def median(call):
        times = []
        for n in range(1500, 1600):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(n)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    q, k, v = (x.requires_grad_() for x in tensors(1, 2048, 16, 128))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    for kind, rows, causal in (("a step of decoding", lambda n: 1, False), ("a prompt", lambda n: n, True)):
        def mine(n):
            return fulgurite.attention(q[:, : rows(n)], k[:, :n], v[:, :n], causal=causal)

        def torchs(n):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*(x[:, :, :m] for x, m in zip(turned, (rows(n), n, n))), is_causal=causal)

        with torch.no_grad():
            # The kernels themselves are known.
            mine(1400)
            torchs(1400)
            yield kind, median(mine), median(torchs)
    for call in (mine, torchs):
        call(1400).sum().backward()
    yield "a prompt with gradients", *(median(lambda n: call(n).sum().backward()) for call in (mine, torchs))


def sustained(options, peers, seconds=1.0):
    """Each alone for a while: what the clock and the power let it do. Forward at 16k, gradients at 4k and 16k."""
    rows, meter = [], Meter()
    for d in options.dims:
        for causal in (False, True):
            for kind, n in (("forward", 16384), ("backward", 4096), ("backward", 16384)):
                q, k, v = tensors(TOKENS // n, n, WIDTH // d, d)
                if kind == "forward":
                    calls = {"ours": ours(q, k, v, causal=causal), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
                    if peers["fa4"]:
                        calls["fa4"] = functools.partial(peers["fa4"], q, k, v, causal=causal)
                else:
                    calls = gradient_calls(peers, q, k, v, torch.randn_like(q), causal)
                flops = (4 if kind == "forward" else 10) * q.numel() * n * (0.5 if causal else 1.0)
                for name, call in calls.items():
                    ms, clock, power = alone(call, meter, seconds)
                    rate = flops / ms / 1e9
                    rows.append({"pass": kind, "d": d, "causal": causal, "n": n, "who": name, "tflops": rate, "mhz": clock, "watts": power})
                    say(
                        f"sustained {kind} d {d} {'causal' if causal else 'full'} {n} {name}: {rate:.0f} TFLOP/s at {clock:.0f} MHz,"
                        f" {power:.0f} W, {power / rate:.2f} J/TFLOP"
                    )
                del calls
    return {"rows": rows}


def alone(call, meter, seconds):
    """Milliseconds of a call that runs alone for so long, with the mean clock and power."""
    call()
    torch.cuda.synchronize()
    start, end, count = event(), event(), 0
    with meter:
        begin = time.perf_counter()
        start.record()
        while time.perf_counter() - begin < seconds:
            for _ in range(4):
                call()
            count += 4
            torch.cuda.current_stream().synchronize()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / count, *meter.mean()


def models(options, peers):
    """Both passes on the layers of known models."""
    return gpu_models.table(gpu_models.MODELS, peers | {"sdpa": sdpa, "first": first}, options.rounds, say)


def shapes(options, peers):
    """Both passes on random layers: odd lengths, grouped heads, other head dims. FlexAttention compiles too long to take part."""
    plain = peers | {"sdpa": sdpa, "first": first, "flex": None}
    return gpu_models.table(gpu_models.drawn(options.count, options.seed), plain, options.rounds, say)


PARTS = {"models": models, "shapes": shapes, "grid": grid, "backward": backward, "decode": decode, "features": features, "varlen": varlen, "cold": cold, "sustained": sustained}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--seqs", type=int, nargs="+", default=list(SEQS))
    parser.add_argument("--count", type=int, default=40, help="random shapes")
    parser.add_argument("--seed", type=int, default=1, help="of the random shapes")
    parser.add_argument("--sketch", type=Path)
    parser.add_argument("--no-flex", action="store_true", help="FlexAttention takes a while to compile")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.manual_seed(1)
    peers = {"fa4": flash4(), "fa3": flash3(), "sketch": sketch(options.sketch), "sketch_backward": sketch_backward(options.sketch), "flex": None}
    if not options.no_flex:
        from torch.nn.attention.flex_attention import flex_attention

        peers["flex"] = torch.compile(flex_attention, dynamic=False)
    found = {"machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}, "command": " ".join(Path(word).name for word in sys.argv[1:])}
    for part in options.parts or PARTS:
        say(f"--- {part}")
        found[part] = PARTS[part](options, peers)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
