"""Timing contenders side by side in one process, and saying on what machine.

Contenders take turns, and the order shifts from round to round, so that a slow minute of the machine hits all of
them. Medians and bests are both kept: a ratio that holds in only one of the two is noise.
"""

import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

# A thread pool that has just finished keeps spinning for a while; the next contender must not pay for it.
PAUSE_S = 0.004
# A turn lasts at least this long where calls are shorter; the calls that warm the turn up are not counted.
TURN_S = 0.02
WARM_CALLS = 2


def say(text):
    print(text, file=sys.stderr, flush=True)


class Contender:
    """A name and a call. A call that measures itself returns its seconds."""

    def __init__(self, name, call, result=None):
        self.name, self.call, self.result = name, call, result


def race(contenders, seconds, rounds):
    """{name: {median_s, best_s, calls, cpus}}, after at least `rounds` rounds and `seconds` seconds."""
    bursts, times, used = {}, {}, {}
    for c in contenders:
        c.call()
        start = time.perf_counter()
        c.call()
        once = time.perf_counter() - start
        bursts[c.name] = 1 if once > TURN_S else WARM_CALLS + min(200, math.ceil(TURN_S / once))
        times[c.name], used[c.name] = [], [0.0, 0.0]
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        shift = done % len(contenders)
        for c in contenders[shift:] + contenders[:shift]:
            time.sleep(PAUSE_S)
            for call in range(bursts[c.name]):
                cpu, start = time.process_time(), time.perf_counter()
                own = c.call()
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
                if call < WARM_CALLS and bursts[c.name] > 1:
                    continue
                times[c.name].append(own if isinstance(own, float) else wall)
                used[c.name][0] += cpu
                used[c.name][1] += wall
        done += 1
    return {
        name: {
            "median_s": statistics.median(all_times),
            "best_s": min(all_times),
            "calls": len(all_times),
            "cpus": used[name][0] / used[name][1],
        }
        for name, all_times in times.items()
    }


def differences(contenders, reference):
    """({name: largest absolute difference from the contender named `reference`}, its largest element).

    A difference is NaN where one of the two is not a number.
    """
    import numpy as np

    want = next(c for c in contenders if c.name == reference).result()
    worst = lambda got: max(float(np.abs(g.astype(np.float32) - w).max()) for g, w in zip(got, want))
    others = {c.name: worst(c.result()) for c in contenders if c.result and c.name != reference}
    return others, max(float(np.abs(w).max()) for w in want)


def geometric_mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


class Steal:
    """The share of CPU time that the host gave to other guests since this was made."""

    def __init__(self):
        self.before = self._read()

    @staticmethod
    def _read():
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return 0, 1
        return fields[7], sum(fields)

    def share(self):
        steal, total = self._read()
        return (steal - self.before[0]) / max(1, total - self.before[1])


def last_level_cache_bytes():
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes)


def machine():
    info = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "system": platform.platform()}
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        fields = dict(tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
        wanted = ("avx2", "fma", "avx512", "avx_vnni", "amx")
        flags = [flag for flag in fields.get("flags", "").split() if flag.startswith(wanted)]
        info |= {
            "cpu": fields.get("model name", info["cpu"]),
            "family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
            "flags": flags,
        }
    except OSError:
        pass
    info["last_level_cache_mib"] = last_level_cache_bytes() >> 20
    info["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return info


def commit():
    try:
        run = lambda *args: subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + (" with changes" if run("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def today():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
