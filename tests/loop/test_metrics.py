import json
import sys
import types

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.loop import JsonlWriter, TensorBoardWriter, WandbWriter, has_module, require


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


def test_wandb_gets_run_and_metrics(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    def init(**kwargs):
        calls.append(("init", kwargs))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    writer = WandbWriter(tmp_path, project="p", name="n", config={"a": 1})
    writer.write(3, {"loss": 1.5})
    writer.close()
    options = {"dir": str(tmp_path), "project": "p", "name": "n", "mode": "offline"}
    assert calls == [
        ("init", {**options, "config": {"a": 1}}),
        ("log", {"loss": 1.5}, 3),
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
    message = rf"needs the module '{module}', .* pip install 'axon_dist\[loggers\]'"
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_require_names_what_it_is_for():
    with pytest.raises(ConfigError, match="a dream needs the module 'no_such', which is not inst"):
        require("no_such", "plots", "a dream")
