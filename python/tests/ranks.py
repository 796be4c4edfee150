"""Processes for tests of `fulgurite.distributed`: a pool of gloo ranks that run functions of test modules.

A worker imports torch once and then takes one job after the other.
"""

import atexit
import datetime
import importlib
import multiprocessing
import os
import socket
import sys
import traceback

RANKS = 4


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _work(rank, ranks, port, pipe, path):
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    # Every process has to take part in making each group.
    groups = {count: dist.new_group(list(range(count))) for count in range(1, ranks + 1)}
    while True:
        job = pipe.recv()
        if job is None:
            os._exit(0)
        module, name, count, arguments = job
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(groups[count], rank, count, *arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class Pool:
    """Processes that wait for jobs. `run` gives the results of the first `count` of them."""

    def __init__(self, ranks=RANKS):
        # One process imports torch, and the ranks are forks of it.
        context, port = multiprocessing.get_context("forkserver"), free_port()
        context.set_forkserver_preload(["torch.distributed.device_mesh"])
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, ranks, port, there, sys.path), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        atexit.register(self.close)

    def outcomes(self, function, count, *arguments, seconds=90):
        """(True, result) or (False, error) of each rank. `function` is a function of a test module, which is called
        with the group, the rank, the number of ranks, and the arguments."""
        for pipe in self.pipes[:count]:
            pipe.send((function.__module__, function.__name__, count, arguments))
        found = []
        for rank, pipe in enumerate(self.pipes[:count]):
            assert pipe.poll(seconds), f"rank {rank} of {count} did not answer in {seconds} s"
            found.append(pipe.recv())
        return found

    def run(self, function, count, *arguments, seconds=90):
        """The results of all ranks; fails if one of them raised an error."""
        found = self.outcomes(function, count, *arguments, seconds=seconds)
        for rank, (ok, result) in enumerate(found):
            assert ok, f"rank {rank}: {result[2]}"
        return [result for _, result in found]

    def close(self):
        """Ends the processes."""
        for pipe, process in zip(self.pipes, self.processes):
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(2)
            if process.is_alive():
                process.kill()
        self.pipes, self.processes = [], []
