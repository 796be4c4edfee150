"""Calls that are recorded in CUDA graphs of torch: each has memory of its own for as long as it can be replayed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

import fulgurite  # noqa: E402


def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def record(work, before=True):
    """A graph of what `work` does, and its results; it is done before, as torch asks for, or not."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if before:
            work()
        stream.synchronize()
        graph.capture_begin()
        results = work()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results


def gradients(seed):
    """Draws a problem, and returns what computes its o, d_q, d_k and d_v to the same bits every time."""
    torch.manual_seed(seed)
    q, k, v, d_o = (draw(1, 640, 4, 128) for _ in range(4))

    def work():
        o, lse = fulgurite.attention(q, k, v, causal=True, return_lse=True)
        return o, *fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True, deterministic=True)[:3]

    return work


def same(results, wanted):
    return all(torch.equal(a, b) for a, b in zip(results, wanted))


def test_recordings_run_side_by_side():
    """Two graphs of one problem, and eager calls of it, on three streams."""
    works = [gradients(seed) for seed in range(3)]
    wanted = [work() for work in works]
    recorded = [record(work) for work in works[:2]]
    streams = [torch.cuda.Stream() for _ in recorded]
    torch.cuda.synchronize()
    for _ in range(50):
        for (graph, _), stream in zip(recorded, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = works[2]()
        torch.cuda.synchronize()
        assert same(eager, wanted[2])
        assert all(same(results, want) for (_, results), want in zip(recorded, wanted))


def test_branches_of_a_recording_run_side_by_side():
    works = [gradients(seed) for seed in range(2)]
    wanted = [work() for work in works]
    aside = torch.cuda.Stream()

    def both():
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            first = works[0]()
        second = works[1]()
        torch.cuda.current_stream().wait_stream(aside)
        return first, second

    graph, results = record(both)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(got, want) for got, want in zip(results, wanted))


def test_the_first_call_of_its_kind_may_be_recorded():
    """Its kernels are compiled meanwhile."""
    q, k, v, d_o = (draw(2, 200, 2, 80) for _ in range(4))

    def work():
        o, lse = fulgurite.attention(q, k, v, softcap=7.25, window=(31, 5), return_lse=True)
        options = {"softcap": 7.25, "window": (31, 5), "deterministic": True}
        return o, *fulgurite.attention_backward(d_o, q, k, v, o, lse, **options)[:3]

    graph, results = record(work, before=False)
    graph.replay()
    torch.cuda.synchronize()
    assert same(results, work())


def test_the_first_call_of_a_process_may_be_recorded():
    """Torch's generator of random numbers wants to be used before."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, fulgurite
q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = fulgurite.attention(q, k, v)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(o, fulgurite.attention(q, k, v))
"""
    package = str(Path(fulgurite.__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code, package], check=True, timeout=120)


def test_memory_of_a_recording_is_freed_while_another_is_made():
    work = gradients(7)
    wanted = work()
    graph, _ = record(work)
    del graph, _
    # The driver tells when it likes that the graph is gone.
    time.sleep(0.2)
    graph, results = record(work, before=False)
    graph.replay()
    torch.cuda.synchronize()
    assert same(results, wanted)


def test_recordings_that_are_gone_leave_nothing():
    """256 recordings of so many queries use up the counters; those of gradients take more than a MiB each."""
    q, k, v = draw(256, 1, 32, 128), draw(256, 100, 8, 128), draw(256, 100, 8, 128)
    backward = gradients(5)

    def work():
        return fulgurite.attention(q, k, v), *backward()

    wanted = work()
    for i in range(1000):
        graph, results = record(work)
        if i % 100 == 0:
            graph.replay()
            torch.cuda.synchronize()
            assert same(results, wanted)
        if i == 20:
            del graph, results
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info()[0]
    del graph, results
    torch.cuda.empty_cache()
    # The driver itself keeps some 40 KiB for each.
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20


def test_a_recording_outlives_what_is_known_of_its_problem():
    """After hundreds of other lengths, and calls whose LSE, which nobody reads, is larger."""
    q, k, v = draw(1, 300, 4, 128), draw(1, 300, 4, 128), draw(1, 300, 4, 128)
    graph, out = record(lambda: fulgurite.attention(q, k, v, causal=True))
    wanted = fulgurite.attention(q, k, v, causal=True)
    for length in range(1, 560):
        fulgurite.attention(q[:, :length % 300 + 1], k[:, : length // 2 + 1], v[:, : length // 2 + 1], causal=True)
    for rows in (1 << 13, 1 << 17):
        large = draw(1, rows, 16, 64)
        fulgurite.attention(large, large[:, :64], large[:, :64])
    del large
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(2000)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    assert not any(bool(x.any()) for x in others)
