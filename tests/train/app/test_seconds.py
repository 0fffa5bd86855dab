"""Every second of a run is counted once, the same in the table, the report and on the clock."""

import io
import subprocess
import sys
import time

import pytest
from rich.console import Console

from axon_dist.core import clock
from axon_dist.core.words import clock_time
from axon_dist.train.app import train
from axon_dist.train.app.run_records import read_recorded
from axon_dist.train.app.summary import summary_table
from axon_dist.train.config import RunConfig
from tests.line import OWN


def test_the_seconds_of_a_run_are_those_of_the_clock(tiny):
    began = time.perf_counter() - 100
    console = Console(file=io.StringIO(), width=200)
    done = train(RunConfig.from_dict(tiny | OWN), console, began=began)
    elapsed = time.perf_counter() - began
    seconds = done.summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(elapsed, abs=0.5)
    assert seconds["start"] > 100
    report = read_recorded(done.directory.path).figures()["time"]
    assert report == clock_time(sum(seconds.values()))
    assert f"{report}, of which" in console.file.getvalue()


def test_the_parts_of_the_time_row_are_all_of_it():
    seconds = {
        "start": 30.0, "initialize": 4.0, "compile": 5.0, "data": 1.0, "step": 20.0,
        "validation": 3.0, "save": 2.0, "lost": 0.0, "other": 1.0, "end": 6.0,
    }  # fmt: skip
    summary = {
        "seconds": seconds, "train_seconds": 21.0, "first_step": 0, "name": "a",
        "ended": "finished", "unit": "nats", "item": "tokens", "items_per_second": 1.0,
        "steps": 3, "train_loss": 1.0, "validation_loss": 1.0, "validation_metrics": {},
        "state_bytes_per_device": 1,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(summary))
    assert (
        "1:12, of which 0:34 starting, 0:05 compiling, 0:21 in training steps, 0:03 validating, "
        "0:02 saving, 0:06 ending, 0:01 elsewhere"
    ) in console.file.getvalue()


def test_a_process_knows_when_it_began():
    code = (
        "import time; time.sleep(0.5); from axon_dist.core.clock import process_began; "
        "print(time.perf_counter() - process_began())"
    )
    begin = time.perf_counter()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 < float(told.stdout) <= time.perf_counter() - begin + 0.02


def test_time_before_exec_is_not_part_of_the_start(monkeypatch):
    monkeypatch.setattr(clock, "_age", lambda: 7200.0 + time.perf_counter() - clock._IMPORTED)
    assert clock.process_began() == clock._IMPORTED - clock._USED
    monkeypatch.setattr(clock, "_age", lambda: 1.0 + time.perf_counter() - clock._IMPORTED)
    assert clock.process_began() == pytest.approx(clock._IMPORTED - 1, abs=1e-3)
