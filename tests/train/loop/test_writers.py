import json
import socket
import sys
import types
import urllib.request

import pytest

from axon_dist.core.errors import ConfigError, require
from axon_dist.train.loop import (
    JsonlWriter,
    MlflowWriter,
    PrometheusWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    has_module,
)


def test_jsonl_can_be_read_while_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"loss": 2.0})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 2.0}
    writer.write(2, {"loss": float("nan"), "norm": float("inf")})
    writer.close()
    last = path.read_text().splitlines()[-1]
    assert json.loads(last) == {"step": 2, "loss": "nan", "norm": "inf"}


def test_jsonl_adds_to_what_is_there(tmp_path):
    for step in (1, 2):
        writer = JsonlWriter(tmp_path / "m.jsonl")
        writer.write(step, {})
        writer.close()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(not has_module("tensorboardX"), reason="needs the extra 'loggers'")
def test_tensorboard_writes_event_files(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(3, {"train/loss": 1.5})
    writer.close()
    (events,) = tmp_path.glob("events*")
    assert b"train/loss" in events.read_bytes()


def test_tensorboard_hides_the_events_of_steps_that_are_taken_again(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, directory, **options):
            calls.append(options)
            (tmp_path / "events.1").touch()

        def add_scalar(self, name, value, step):
            calls.append((name, step))

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    writer = TensorBoardWriter(tmp_path)
    # A rollback to step 1, then one to step 3.
    for name, step in [("a", 2), ("a", 4), ("b", 4), ("a", 2), ("a", 4), ("a", 4)]:
        writer.write(step, {name: 1.0})
    writer.close()
    assert calls == [
        {"purge_step": None}, ("a", 2), ("a", 4), ("b", 4),
        "close", {"purge_step": 2, "filename_suffix": ".1"}, ("a", 2), ("a", 4),
        "close", {"purge_step": 4, "filename_suffix": ".2"}, ("a", 4), "close",
    ]  # fmt: skip
    calls.clear()
    # A resumed run repeats the steps after that of its checkpoint.
    TensorBoardWriter(tmp_path, first_step=3).write(4, {"a": 1.0})
    assert calls == [{"purge_step": 4}, ("a", 4)]


@pytest.mark.parametrize("run_id", [None, "kept"])
def test_wandb_gets_run_and_metrics(tmp_path, monkeypatch, run_id):
    calls = []

    class Run:
        id = run_id or "new"

        def define_metric(self, name, step_metric=None):
            calls.append(("define", name, step_metric))

        def log(self, metrics):
            calls.append(("log", metrics))

        def finish(self):
            calls.append(("finish",))

    def init(**kwargs):
        calls.append(("init", kwargs))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    writer = WandbWriter(tmp_path, project="p", name="n", config={"a": 1}, run_id=run_id)
    writer.write(3, {"loss": 1.5})
    # W&B drops records whose own step goes back, so they have none.
    writer.write(2, {"loss": 2.5})
    writer.close()
    assert writer.run_id == (run_id or "new")
    resumed = {"id": "kept", "resume": "allow", "allow_val_change": True} if run_id else {}
    options = {"dir": str(tmp_path), "project": "p", "name": "n", "mode": "offline"}
    assert calls == [
        ("init", {**options, "config": {"a": 1}, **resumed}),
        ("define", "step", None),
        ("define", "*", "step"),
        ("log", {"loss": 1.5, "step": 3}),
        ("log", {"loss": 2.5, "step": 2}),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("tensorboardX", lambda path: TensorBoardWriter(path)),
        ("wandb", lambda path: WandbWriter(path, project="p", name="n")),
    ],
)
def test_a_missing_module_names_the_extra(tmp_path, monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"needs the module '{module}', .* pip install -e '.*\[loggers\]'"
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_require_names_what_it_is_for():
    with pytest.raises(ConfigError, match="a dream needs the module 'no_such', which is not inst"):
        require("no_such", "plots", "a dream")


@pytest.mark.parametrize("run_id", [None, "kept"])
def test_trackio_gets_run_and_metrics(monkeypatch, run_id):
    calls = []
    run = types.SimpleNamespace(
        name=run_id or "n-2",
        log=lambda metrics, step: calls.append(("log", metrics, step)),
        finish=lambda: calls.append(("finish",)),
    )
    init = lambda **kwargs: calls.append(("init", kwargs)) or run
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    writer = TrackioWriter(project="p", name="n", config={"a": 1}, run_id=run_id)
    assert writer.run_id == (run_id or "n-2")
    resumed = {"name": "kept", "resume": "allow"} if run_id else {}
    writer.write(3, {"loss": 1.5})
    writer.close()
    assert calls == [
        ("init", {"project": "p", "name": "n", "config": {"a": 1}, **resumed}),
        ("log", {"loss": 1.5}, 3),
        ("finish",),
    ]


@pytest.mark.parametrize("is_known", [False, True])
def test_mlflow_gets_run_parameters_and_metrics(monkeypatch, is_known):
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(tracking_uri)

        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id="known") if is_known else None

        def create_experiment(self, name):
            return f"new {name}"

        def create_run(self, experiment_id, run_name):
            calls.append((experiment_id, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

        def log_param(self, run_id, key, value):
            calls.append((run_id, key, value))

        def log_metric(self, run_id, key, value, step):
            calls.append((run_id, key, value, step))

        def set_terminated(self, run_id):
            calls.append((run_id, "ended"))

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    writer = MlflowWriter("sqlite:///x", experiment="e", name="n", config={"a": {"b": 1}, "c": 2})
    writer.write(3, {"train/loss": 1.5})
    writer.close()
    assert calls == [
        "sqlite:///x", ("known" if is_known else "new e", "n"), ("r", "a.b", "1"), ("r", "c", "2"),
        ("r", "train/loss", 1.5, 3), ("r", "ended"),
    ]  # fmt: skip


def test_mlflow_continues_a_run_that_the_server_has(monkeypatch):
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            pass

        def update_run(self, run_id, status):
            if run_id != "kept":
                raise RuntimeError(f"no run {run_id}")
            calls.append((run_id, status))

        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id="known")

        def create_run(self, experiment_id, run_name):
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="new"))

        def log_param(self, run_id, key, value):
            calls.append((run_id, key, value))

        def log_metric(self, run_id, key, value, step):
            calls.append((run_id, key, step))

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    make = lambda kept: MlflowWriter("x", experiment="e", name="n", config={"a": 1}, run_id=kept)
    make("kept").write(3, {"loss": 1.5})
    # The parameters of a run cannot change.
    assert calls == [("kept", "RUNNING"), ("kept", "loss", 3)]
    calls.clear()
    assert make("gone").run_id == "new"
    assert calls == [("new", "a", "1")]


def test_prometheus_reads_the_last_values(tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "m.prom"
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    writer = PrometheusWriter(path, run='a "b"', port=port)
    writer.write(1, {"train/loss": 5.5})
    writer.write(2, {"train/loss": float("nan"), "train/grad_norm/blocks/0": 1e-7})
    text = path.read_text()
    assert text == (
        "# HELP axon_step the last value of step\n"
        "# TYPE axon_step gauge\n"
        'axon_step{part="",run="a \\"b\\""} 2.0\n'
        "# HELP axon_train_loss the last value of train/loss\n"
        "# TYPE axon_train_loss gauge\n"
        'axon_train_loss{part="",run="a \\"b\\""} NaN\n'
        "# HELP axon_train_grad_norm the last value of train/grad_norm\n"
        "# TYPE axon_train_grad_norm gauge\n"
        'axon_train_grad_norm{part="blocks/0",run="a \\"b\\""} 1e-07\n'
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as served:
        assert served.read().decode() == text
    with pytest.raises(ConfigError, match=f"cannot serve port {port}"):
        PrometheusWriter(path, run="n", port=port)
    writer.close()
    assert list(tmp_path.iterdir()) == [path]
    PrometheusWriter(path, run="n", port=port).close()
    with pytest.raises(ConfigError) as error:
        PrometheusWriter(tmp_path / "m.txt", run="n")
    assert error.value.code == "not-prom"


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("prometheus_client", lambda: PrometheusWriter("a.prom", run="n")),
        ("trackio", lambda: TrackioWriter(project="p", name="n")),
        ("mlflow", lambda: MlflowWriter("x", experiment="e", name="n")),
    ],
)
def test_writers_that_are_not_installed_say_how_to(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module}.* pip install -e '.*\[loggers\]'"):
        make()
