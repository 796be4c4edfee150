"""Timing contenders on a GPU side by side in one process."""

import statistics

import torch


def event():
    return torch.cuda.Event(enable_timing=True)


def samples(calls, rounds, target_ms=1.5):
    """Milliseconds of each round. The contenders alternate, and every other round begins with the last one."""
    times, repeats = {name: [] for name in calls}, {}
    for name, call in calls.items():
        call()
        start, end = event(), event()
        start.record(), call(), call(), end.record()
        torch.cuda.synchronize()
        repeats[name] = max(1, min(50, int(target_ms / max(1e-3, start.elapsed_time(end) / 2))))
    for number in range(rounds):
        marks = []
        for name, call in list(calls.items())[:: 1 if number % 2 == 0 else -1]:
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
    return times


def race(calls, rounds, target_ms=1.5):
    """Medians of milliseconds."""
    return {name: statistics.median(times) for name, times in samples(calls, rounds, target_ms).items()}
