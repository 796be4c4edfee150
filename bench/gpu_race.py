"""Timing contenders on a GPU side by side in one process."""

import statistics

import torch


def event():
    return torch.cuda.Event(enable_timing=True)


def race(calls, rounds, target_ms=1.5):
    """Medians of milliseconds, the contenders alternating."""
    times, repeats = {name: [] for name in calls}, {}
    for name, call in calls.items():
        call()
        start, end = event(), event()
        start.record(), call(), call(), end.record()
        torch.cuda.synchronize()
        repeats[name] = max(1, min(50, int(target_ms / max(1e-3, start.elapsed_time(end) / 2))))
    for _ in range(rounds):
        marks = []
        for name, call in calls.items():
            start, end = event(), event()
            call()  # the neighbour's heat and caches
            start.record()
            for _ in range(repeats[name]):
                call()
            end.record()
            marks.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in marks:
            times[name].append(start.elapsed_time(end) / repeats[name])
    return {name: statistics.median(all_times) for name, all_times in times.items()}
