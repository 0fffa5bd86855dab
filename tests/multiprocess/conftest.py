import os
import subprocess
import sys
import time

import pytest

from axon_dist.launch.local import LaunchPlan, free_port, rank_environments

SILENCE_SECONDS = 4
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""As `conftest.py` of the root has them: less is compiled."""


class Processes:
    """Some processes of one run, started as torchrun would, each writing to a file."""

    def __init__(self, folder, command, count, **variables):
        plan = LaunchPlan(command=tuple(command), num_processes=count)
        base = {k: v for k, v in os.environ.items() if k != "NPROC"}
        base |= {"XLA_FLAGS": FLAGS}
        base |= {"AXON_SILENCE_TIMEOUT": str(SILENCE_SECONDS), "AXON_LAUNCH_TIMEOUT": "60"}
        self.logs = [folder / f"{rank}.txt" for rank in range(count)]
        self.all = []
        envs = rank_environments(plan, base, count, free_port())
        for log, env in zip(self.logs, envs, strict=True):
            with open(log, "wb") as file:
                self.all.append(
                    subprocess.Popen(command, env=env | variables, stdout=file, stderr=file)
                )

    def wait(self, ranks, timeout):
        """The exit codes of some ranks."""
        deadline = time.monotonic() + timeout
        return [self.all[r].wait(max(deadline - time.monotonic(), 0.1)) for r in ranks]

    def wait_for(self, words, timeout=120):
        """Returns once every rank has said something."""
        deadline = time.monotonic() + timeout
        while not all(words in self.text(rank) for rank in range(len(self.all))):
            assert time.monotonic() < deadline, self.text(0)
            assert all(process.poll() is None for process in self.all), self.text(0)
            time.sleep(0.1)

    def text(self, rank):
        return self.logs[rank].read_text()

    def end(self):
        for process in self.all:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts a Python program, or a module, as several processes."""
    started = []

    def run(count, *arguments, **variables):
        started.append(Processes(tmp_path, [sys.executable, *arguments], count, **variables))
        return started[-1]

    yield run
    for processes in started:
        processes.end()
