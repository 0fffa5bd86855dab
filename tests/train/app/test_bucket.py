"""Runs, data and weights in buckets, with a server on this machine."""

import json
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_place
from axon_dist.train.app import evaluate, export_run, train
from axon_dist.train.app.lock import LEASE, Lease
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from tests.line import OWN

from .test_resume import bits

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def config(tiny):
    def make(run_dir, **sections):
        data = tiny | {"run_dir": str(run_dir), "checkpoint": {"every": 1, "keep": 9}}
        data["model"] = tiny["model"] | {"dropout": 0.1}
        data["train"] = tiny["train"] | {"log_every": 1}
        return RunConfig.from_dict(data | sections)

    return make


def metrics(contents):
    rows = map(json.loads, contents.decode().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def drop_after(store, step):
    """Simulates a machine that died after the checkpoint of a step."""
    for name in store.names("bucket/run/checkpoints/"):
        if int(name.split("/")[3].removeprefix("step_")) > step:
            del store.objects[name]
    lines = store.objects["bucket/run/metrics.jsonl"][1].splitlines(keepends=True)
    renewing = [line for line in lines if json.loads(line)["step"] <= step]
    store.objects["bucket/run/metrics.jsonl"] = 1, b"".join(renewing)


@pytest.mark.full
def test_what_a_run_leaves_in_a_bucket(config, store, tiny):
    options = {**tiny["train"], "steps": 2, "eval_every": 0, "log_every": 1}
    done = train(config("s3://bucket/run", train=options, **OWN))
    assert str(done.directory.place) == "s3://bucket/run"
    assert not done.directory.path.exists()
    names = {name.removeprefix("bucket/run/").split("/")[0] for name in store.names()}
    wanted = {"config.yaml", "metrics.jsonl", "program.json", "summary.json", LEASE, "checkpoints"}
    assert wanted <= names
    assert store.objects[f"bucket/run/{LEASE}"][1] == b"{}"
    rows = metrics(store.objects["bucket/run/metrics.jsonl"][1])
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]


@pytest.mark.full
def test_a_run_in_a_bucket_goes_on_as_one_on_a_disk_and_is_read(
    config, store, tmp_path, monkeypatch
):
    whole = train(config(tmp_path / "whole"))
    store.faults = 0.1
    address = "gs://bucket/run"
    train(config(address))
    with pytest.raises(ConfigError, match="run_dir: 'gs://bucket/run' already contains a run"):
        train(config(address))
    store.faults = 0.0
    drop_after(store, 3)
    told = store.requests
    told.clear()
    resumed = train(config(address), resume="auto")
    assert bits(resumed.result.state) == bits(whole.result.state)
    there = store.objects["bucket/run/metrics.jsonl"][1]
    assert metrics(there) == metrics(whole.directory.metrics.read_bytes())
    assert json.loads(store.objects["bucket/run/summary.json"][1])["steps"] == 6
    first = next(n for n, line in enumerate(told) if line.startswith("DELETE"))
    assert "summary.json" in told[first]
    assert not resumed.directory.path.exists()
    found, expected = evaluate(address), evaluate(tmp_path / "whole")
    assert str(found.checkpoint) == f"{address}/checkpoints/step_00000006"
    assert found.metrics == expected.metrics
    assert export_run(address, tmp_path / "out.safetensors", step=6)
    monkeypatch.chdir(tmp_path)
    assert main(["report", address]) == 0
    assert "final validation loss" in (tmp_path / "report.html").read_text()


def test_unsupported_settings_are_refused_before_anything_runs(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"checkpoint.type: full is not.*Use sharded, or a folder"
    ):
        config("gs://bucket/run", checkpoint={"type": "full"})
    with pytest.raises(ConfigError, match=r"checkpoint.type: full is not"):
        config(tmp_path, checkpoint={"type": "full", "dir": "s3://bucket/run"})


@pytest.fixture(params=["gs", "s3"])
def folder(store, request):
    return as_place(f"{request.param}://bucket/run", "run_dir")


def elsewhere(store, **changes):
    """Makes the lease look like that of a process on another machine."""
    generation, contents = store.objects[f"bucket/run/{LEASE}"]
    holder = json.loads(contents) | {"machine": "another", "token": "its"} | changes
    store.objects[f"bucket/run/{LEASE}"] = generation + 50_000, json.dumps(holder).encode()


def test_the_lease_of_a_live_run_is_its_own(folder):
    told = []
    with Lease(folder, "run_dir", told.append, seconds=0.6).renewing():
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=r"run_dir: '.*://bucket/run' is in use by process "
                           r"\d+ on \S+, since 2\d\d\d-.*; wait until it ends"):  # fmt: skip
            Lease(folder, "run_dir", told.append, seconds=5.0)
        assert time.monotonic() - begun < 5.0
    assert "waiting up to 5 s to see whether that process is alive" in told[0]
    Lease(folder, "run_dir", told.append)
    assert len(told) == 1


def test_the_lease_of_a_dead_run_is_taken_after_its_time(folder, store):
    lost = Lease(folder, "run_dir", print, seconds=0.5)
    elsewhere(store)
    begun = time.monotonic()
    now = Lease(folder, "run_dir", lambda told: None, seconds=0.5)
    assert time.monotonic() - begun >= 0.5
    now.renew()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"was taken over by process .*this one must stop"):
            lost.renew()
    now.renew()


def test_the_lease_of_a_process_that_is_gone_from_this_machine_is_none(folder, store):
    Lease(folder, "run_dir", print)
    generation, contents = store.objects[f"bucket/run/{LEASE}"]
    gone = json.dumps(json.loads(contents) | {"pid": 2**22 + 1, "token": "its"}).encode()
    store.objects[f"bucket/run/{LEASE}"] = generation + 50_000, gone
    Lease(folder, "run_dir", print).renew()


def test_only_one_of_four_takes_the_lock(folder, store):
    taken, refused, others_gave_up = [], [], threading.Event()

    def take():
        try:
            lease = Lease(folder, "run_dir", lambda told: None, seconds=3.0)
            taken.append(lease)
            # A released lease may be taken, so it is kept until nobody waits for it any more.
            with lease.renewing():
                others_gave_up.wait(30)
        except ConfigError as error:
            refused.append(error)
            if len(refused) == 3:
                others_gave_up.set()

    store.faults = 0.1
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 3), (taken, refused)


def test_a_write_whose_answer_was_lost_is_ones_own(folder, store, monkeypatch):
    lease = Lease(folder, "run_dir", print)
    faults = iter(["deaf"])
    monkeypatch.setattr(type(store), "fault", lambda self: next(faults, None))
    lease.renew()
    lease.renew()


def test_a_store_that_holds_no_conditions_is_refused(folder, store, monkeypatch):
    write = type(store).write
    monkeypatch.setattr(
        type(store), "write", lambda self, name, body, wanted: write(self, name, body, None)
    )
    with pytest.raises(ConfigError, match="two runs could write there at once; name a folder"):
        Lease(folder, "run_dir", print)


@pytest.mark.full
def test_runs_that_are_killed_at_a_store_that_fails_end_as_undisturbed_ones():
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bucket", "--kills", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
