"""Nothing silently wrong: NaN, threads, forks, gradients that are not there, values that are read as they are meant."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy
import pytest
from judge import close, judged
from reference import attention as reference

import fulgurite
import fulgurite.cluster


def ones(*shape):
    return numpy.ones(shape, numpy.float32)


@pytest.mark.parametrize("engine", ["oracle", "cpu"])
def test_a_row_of_nan_says_so(engine):
    x, q = ones(1, 4, 2, 8), ones(1, 4, 2, 8)
    q[0, 1] = numpy.nan
    o, lse = fulgurite.attention(q, x, x, return_lse=True, engine=engine)
    assert numpy.isnan(o[0, 1]).all() and numpy.isnan(lse[0, :, 1]).all()
    assert numpy.isfinite(o[0, [0, 2, 3]]).all() and numpy.isfinite(lse[0][:, [0, 2, 3]]).all()


def test_a_hidden_value_reaches_nobody():
    x, v = ones(1, 300, 1, 32), ones(1, 300, 1, 32)
    v[0, 200] = numpy.nan
    o = fulgurite.attention(x, x, v, causal=True)
    rows = numpy.isnan(o[0, :, 0]).all(-1)
    assert rows[200:].all() and not rows[:200].any()


def test_tracing_in_threads():
    """A callable that gives way to other threads registers its arrays in its own call."""
    x = ones(1, 16, 1, 8)
    wrong, switch = [], sys.getswitchinterval()
    # The same products, added as a bias, before there are threads.
    biases = {value: numpy.full((16, 16), value * value, numpy.float32) for value in (1.0, 2.0, 3.0, 4.0)}
    alone = {value: fulgurite.attention(x, x, x, bias=bias, return_lse=True)[1] for value, bias in biases.items()}

    def work(value):
        bias = numpy.full(16, value, numpy.float32)
        ready = threading.Event()

        def score_mod(score, b, h, q_idx, kv_idx):
            ready.wait(1e-4)
            return score + bias[kv_idx] * bias[q_idx]

        for _ in range(40):
            _, lse = fulgurite.attention(x, x, x, score_mod=score_mod, return_lse=True)
            if not numpy.array_equal(lse, alone[value]):
                wrong.append((value, lse.ravel()[:2]))

    def guarded(value):
        try:
            work(value)
        except Exception as error:  # told below: a thread's own would only be printed
            wrong.append((value, error))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=guarded, args=(value,)) for value in biases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not wrong, wrong[:3]


def test_arguments_are_told_apart_by_type():
    x = ones(1, 4, 1, 8)
    fulgurite.attention(x, x, x, causal=True, window=(1, 2))
    for wrong in ({"causal": 1}, {"causal": 0}, {"window": (1.0, 2.0)}):
        for _ in range(2):
            with pytest.raises(ValueError):
                fulgurite.attention(x, x, x, **wrong)


def test_block_masks_without_keys():
    mask = fulgurite.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 0)
    assert mask.kv_indices.shape == (1, 1, 2, 0)


def test_masked_arrays_are_refused():
    x = ones(1, 4, 1, 8)
    masked = numpy.ma.masked_array(x, mask=x > 0)
    with pytest.raises(ValueError, match="filled"):
        fulgurite.attention(masked, x, x)
    lengths = numpy.ma.masked_array([4], mask=[True])
    with pytest.raises(ValueError, match="filled"):
        fulgurite.attention(x, x, x, used_lengths=(None, lengths))
    # Copies for strides and for other types would lose the mask before anyone sees it.
    apart = numpy.ma.masked_array(ones(1, 4, 1, 16), mask=True)[..., ::2]
    lse = ones(1, 1, 4)
    calls = [
        lambda: fulgurite.flash_attn_func(x, apart, x),
        lambda: fulgurite.merge(x, lse, masked, lse),
        lambda: fulgurite.cluster.KMeans(1).fit(numpy.ma.masked_array(ones(4, 2), mask=True)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="filled"):
            call()


def test_numbers_of_threads_are_bounded():
    points = ones(6, 2)
    for threads in (-1, 0, 4097, 2**63):
        with pytest.raises(ValueError, match="threads"):
            fulgurite.cluster.KMeans(2, n_threads=threads).fit(points)
        with pytest.raises(ValueError, match="threads"):
            fulgurite.attention(ones(1, 2, 1, 8), ones(1, 2, 1, 8), ones(1, 2, 1, 8), threads=threads)


class OnlyDLPack:
    """An array that can be read through DLPack and has nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_array_with_nothing_but_dlpack_is_refused():
    x = ones(1, 4, 1, 8)
    with pytest.raises(ValueError, match="`q`"):
        fulgurite.attention(OnlyDLPack(x), x, x)


def test_addresses_are_no_arrays():
    from fulgurite import _fulgurite

    with pytest.raises((ValueError, TypeError)):
        _fulgurite.read_sum([(8, 4096)], 1)


def test_a_refused_call_leaves_the_cache_alone():
    q, cache, new = ones(1, 1, 2, 8), ones(1, 16, 2, 8), 2 * ones(1, 1, 2, 8)
    k_cache, v_cache = cache.copy(), cache.copy()
    calls = [
        {"v": 2 * ones(1, 1, 2, 4)},
        {"v": new.astype(numpy.float16)},
        {"v": new, "softmax_scale": -1.0},
        {"v": new, "k": ones(3)},
        {"v": new, "cache_seqlens": 16},
    ]
    for call in calls:
        arguments = {"k": new, "cache_seqlens": 3, **call}
        with pytest.raises(ValueError):
            fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
        assert (k_cache == cache).all() and (v_cache == cache).all(), call
    o = fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, k=new, v=new, cache_seqlens=3)
    assert (k_cache[0, 3] == 2).all() and o.shape == q.shape


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_children_of_fork_have_workers():
    code = """
        import os, numpy, fulgurite
        x = numpy.ones((4, 512, 8, 64), numpy.float32)
        fulgurite.attention(x, x, x, threads=3)
        child = os.fork()
        if child == 0:
            o = fulgurite.attention(x, x, x, threads=3)
            os._exit(0 if len(os.listdir("/proc/self/task")) >= 3 and (o == 1).all() else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc")
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60).returncode == 0


# Calls that take many seconds each; `x` and `points` are made once.
LONG_CALLS = """
    attention = lambda **more: fulgurite.attention(x, x, x, **more)
    calls = {
        "one thread": lambda: attention(threads=1),
        "threads": lambda: attention(threads=3),
        "a modifier": lambda: attention(score_mod=lambda s, b, h, i, j: np.tanh(s) - abs(i - j)),
        "oracle": lambda: attention(engine="oracle"),
        "gradients": lambda: fulgurite.attention_backward(x, x, x, x, x, lse, threads=3),
        "int8": lambda: attention(precision="int8"),
        "skip": lambda: attention(causal=True, skip="lambda:1e-9"),
        "parallax": lambda: fulgurite.parallax_attention(x, x, x, x),
        "delta rule": lambda: fla.fused_recurrent_gated_delta_rule(many, many, many, gates, beta=-gates),
        "delta rule backward": lambda: fla.chunk_gated_delta_rule_backward(many, many, many, many, gates, -gates),
        "blocks": lambda: fulgurite.create_block_mask(lambda b, h, i, j: (i + j) % 7 < 3, 8, 8, 1 << 19, 1 << 19),
        "clusters": lambda: KMeans(4096, max_iter=500, tol=0).fit(points),
        "neighbours": lambda: NearestNeighbors(n_neighbors=9).fit(points).kneighbors(points),
        "density": lambda: HDBSCAN(min_cluster_size=9).fit(points),
        "components": lambda: PCA(n_components=8).fit(wide),
        "simulator": lambda: fulgurite.attention(short, short, short, engine="sim"),
        "simulated gradients": lambda: fulgurite.attention_backward(
            short, short, short, short, short, lse[..., :4096], engine="sim"
        ),
    }
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_ends_long_calls():
    """Ctrl-C raises within a second, and calls work afterwards as before."""
    before = """
        import os, signal, sys, threading, time
        import numpy as np, fulgurite
        from fulgurite import fla
        from fulgurite.cluster import HDBSCAN, KMeans
        from fulgurite.decomposition import PCA
        from fulgurite.neighbors import NearestNeighbors

        x = np.random.default_rng(0).standard_normal((1, 1 << 17, 2, 64), np.float32)
        lse = np.full((1, 2, 1 << 17), 9.0, np.float32)
        many = np.random.default_rng(0).standard_normal((1, 1 << 20, 2, 64), np.float32)
        gates = np.full((1, 1 << 20, 2), -0.1, np.float32)
        points = np.random.default_rng(0).standard_normal((200_000, 48), np.float32)
        wide = np.random.default_rng(0).standard_normal((4000, 4000), np.float32)
        small, short = x[:, :500], x[:, :4096].astype(np.float16)
        want = fulgurite.attention(small, small, small, threads=3)
    """
    after = """
        slow = []
        for name, call in calls.items():
            sent = []

            def interrupt():
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            timer = threading.Timer(0.25, interrupt)
            timer.start()
            try:
                call()
                timer.cancel()
                slow.append((name, "it ended by itself"))
            except KeyboardInterrupt:
                passed = time.monotonic() - sent[0]
                print(f"{name}: {passed:.2f} s", flush=True)
                if passed >= 1:
                    slow.append((name, passed))
        assert not slow, slow
        assert (fulgurite.attention(small, small, small, threads=3) == want).all()
    """
    done = in_a_process("".join(map(textwrap.dedent, (before, LONG_CALLS, after))), seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr


def in_a_process(code, seconds=60):
    """Runs code in a new process that finds the package that this one tests."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, timeout=seconds, capture_output=True, text=True, env=where)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_handler_may_call():
    """A handler that makes a call itself, during a call, and raises nothing: both have their results."""
    x = numpy.random.default_rng(1).standard_normal((1, 4096, 2, 64), numpy.float32)
    small, seen = x[:, :64], []
    want = fulgurite.attention(x, x, x, threads=2)

    def handler(number, frame):
        seen.append(fulgurite.attention(small, small, small, threads=2))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
    try:
        for _ in range(5):
            assert (fulgurite.attention(x, x, x, threads=2) == want).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen and all((o == fulgurite.attention(small, small, small)).all() for o in seen)


def test_a_cache_is_shared_among_threads():
    """Calls that read a cache while another appends to it wait for each other, never for the GIL at the same time."""
    rows = numpy.random.default_rng(2).standard_normal((64, 2, 32)).astype(numpy.float32)
    cache, failed = fulgurite.KvCache(2, 32, 1 << 16), []

    def work(number):
        try:
            for _ in range(60):
                if number == 0:
                    cache.append(rows, rows)
                elif number == 1:
                    cache.fork(), len(cache)
                elif len(cache):
                    assert numpy.isfinite(cache.attend(rows)).all()
        except Exception as error:  # told below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert len(cache) == 60 * 64


def test_sub_interpreters_are_refused_by_name():
    inner = """
        import re
        try:
            import fulgurite
        except ImportError as error:
            assert re.search("fulgurite.*sub-?interpreter", str(error)), error
        else:
            raise AssertionError("it was imported")
    """
    code = f"""
        import importlib.util
        names = ("_interpreters", "_xxsubinterpreters")
        name = next((name for name in names if importlib.util.find_spec(name)), None)
        if name is None:
            raise SystemExit(77)
        interpreters = __import__(name)
        import fulgurite
        # What was raised inside is returned or raised, by version.
        raised = interpreters.run_string(interpreters.create(), {textwrap.dedent(inner)!r})
        assert raised is None, raised
    """
    done = in_a_process(code)
    if done.returncode == 77:
        pytest.skip("this Python has no sub-interpreters")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="sizes are read in /proc")
def test_refused_memory_is_an_error():
    """A process that may have little memory computes or refuses; it does not end."""
    code = """
        import resource, numpy as np, fulgurite
        from fulgurite.cluster import KMeans
        from fulgurite.decomposition import PCA
        from fulgurite.neighbors import NearestNeighbors
        small = np.ones((1, 64, 1, 64), np.float32)
        tiny = small.astype(np.float16)
        fulgurite.attention(tiny, tiny, tiny, engine="sim")
        points = np.random.default_rng(0).standard_normal((1 << 14, 64), np.float32)
        clusters, near = KMeans(1 << 12, max_iter=1).fit(points), NearestNeighbors(n_neighbors=1).fit(points)
        square = np.random.default_rng(0).standard_normal((3000, 3000), np.float32)
        fulgurite.attention(small, small, small, threads=2)
        one = small[:, :1]
        wide = np.broadcast_to(one, (1, 1 << 19, 1, 64))
        rows, short = np.ones((1, 1 << 19, 1, 64), np.float16), one.astype(np.float16)
        lse = np.ones((1, 1, 1 << 19), np.float32)
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (160 << 20), -1))
        calls = [
            lambda: fulgurite.attention(wide, one, one, engine="oracle"),
            lambda: fulgurite.attention_backward(rows, rows, short, short, rows, lse),
            lambda: fulgurite.attention(rows, short, short, engine="sim"),
            lambda: clusters.transform(points),
            lambda: near.kneighbors(points, n_neighbors=1 << 12),
            lambda: PCA(n_components=4).fit(square),
        ]
        for call in calls:
            try:
                call()
            # A device's refusal is a RuntimeError, and NumPy's of a result is a MemoryError.
            except (ValueError, RuntimeError, MemoryError) as error:
                assert "bytes" in str(error) or "MiB" in str(error), error
            else:
                raise SystemExit("the memory was there")
        assert (fulgurite.attention(small, small, small, threads=2) == 1).all()
    """
    done = in_a_process(code)
    assert done.returncode == 0, done.stdout + done.stderr


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def tensors(self, count=3, **more):
        torch = self.torch
        torch.manual_seed(1)
        return [torch.randn(1, 6, 2, 8, dtype=torch.float32, **more) for _ in range(count)]

    def test_a_second_import(self):
        code = """
            import sys, torch, fulgurite
            for name in [name for name in sys.modules if name.split(".")[0] == "fulgurite"]:
                del sys.modules[name]
            import fulgurite
            x = torch.ones(1, 4, 1, 8, requires_grad=True)
            fulgurite.attention(x, x, x).sum().backward()
        """
        done = in_a_process(code)
        assert done.returncode == 0, done.stderr

    def test_a_captured_tensor_called_grad(self):
        q, k, v = self.tensors()
        grad = self.torch.ones(2, requires_grad=True)
        fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * grad[h]).sum().backward()
        assert grad.grad is not None and grad.grad.abs().sum() > 0

    def test_second_derivatives_are_refused(self):
        torch = self.torch
        q, k, v = self.tensors(requires_grad=True)
        (d_q,) = torch.autograd.grad(fulgurite.attention(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="again"):
            d_q.square().sum().backward()
        # A graph that nobody differentiates is no harm.
        o = fulgurite.attention(q, k, v)
        o.sum().backward(create_graph=True)
        assert q.grad is not None

    def test_forward_mode_is_refused(self):
        forward_ad = self.torch.autograd.forward_ad
        q, k, v = self.tensors()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, self.torch.ones_like(q))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                fulgurite.attention(dual, k, v)
            fulgurite.attention(q, k, v)

    def test_numpy_beside_gradients_is_refused(self):
        q, k, v = self.tensors(requires_grad=True)
        with pytest.raises(ValueError, match="torch tensor"):
            fulgurite.attention(q.detach().numpy(), k, v)

    def test_wide_integers_are_looked_at(self):
        torch = self.torch
        q, k, v = self.tensors()
        wide = torch.tensor([2**32 + 1])
        with pytest.raises(ValueError, match="32-bit"):
            fulgurite.attention(q, k, v, used_lengths=(None, wide))
        documents = torch.tensor([1, 1, 1, 2**32 + 1, 2**32 + 1, 2**32 + 1])
        with pytest.raises(ValueError, match="32-bit"):
            fulgurite.attention(q, k, v, mask_mod=lambda b, h, i, j: documents[i] == documents[j])

    def test_the_negative_bit(self):
        torch = self.torch
        q, k, v = self.tensors()
        want = fulgurite.attention(-q, k, v)
        assert torch.equal(fulgurite.attention(torch._neg_view(q), k, v), want)
        sinks = torch.complex(torch.zeros(2), torch.tensor([1.0, 3.0])).conj().imag
        assert sinks.is_neg()
        assert torch.equal(fulgurite.attention(q, k, v, sinks=sinks), fulgurite.attention(q, k, v, sinks=-sinks.abs()))

    def test_torchs_block_mask_without_keys(self):
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 0, device="cpu")
        q = self.torch.randn(1, 1, 256, 16)
        o = fulgurite.flex_attention(q, q[:, :, :0], q[:, :, :0], block_mask=mask)
        assert (o == 0).all()

    def test_the_cache_of_torch(self):
        torch = self.torch
        q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
        cache = torch.randn(2, 16, 2, 8)
        for lengths in (5, torch.tensor([5, 9], dtype=torch.int32), torch.tensor([5, 9])):
            k, v = cache.clone(), cache.clone()
            with judged():
                o = fulgurite.flash_attn_with_kvcache(q, k, v, k=new, v=new, cache_seqlens=lengths)
            at = [5, 5] if isinstance(lengths, int) else [5, 9]
            for b in range(2):
                assert torch.equal(k[b, at[b]], new[b, 0]) and torch.equal(v[b, at[b]], new[b, 0])
                want, _ = reference(q[b : b + 1], k[b : b + 1, : at[b] + 1], v[b : b + 1, : at[b] + 1])
                close(o[b : b + 1], want)
