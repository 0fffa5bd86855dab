"""Functions named in a run's folder are imported and called only if the caller allows it."""

import sys

import pytest

from axon_dist import load_model
from axon_dist.core.errors import ConfigError
from axon_dist.train.app import evaluate, export_run, generate_text, profile_run
from axon_dist.train.cli.main import main
from axon_dist.train.config.parse import load_untrusted

VERBS = {
    "load_model": load_model,
    "eval": evaluate,
    "generate": lambda run, **more: generate_text(run, ["a"], 1, **more),
    "profile": profile_run,
    "export": lambda run, **more: export_run(run, run / "out.safetensors", **more),
}
CONFIGS = (
    "loss: {factory: 'trap:make'}",
    "loss: {function: 'trap:make'}",
    "model: {factory: 'trap:make'}",
    "data: {factory: 'trap:make'}",
    "optimizer: {factory: 'trap:make'}",
    "x-one: &one {factory: 'trap:make'}\nloss: {<<: *one}",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise RuntimeError('code ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("trap", None)


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_function_of_a_run_needs_trust(folder, verb, text):
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"names the function 'trap:make' under .*--trust"):
        VERBS[verb](folder)


@pytest.mark.parametrize("verb", VERBS)
def test_trust_imports_it(folder, verb):
    (folder / "config.yaml").write_text(CONFIGS[0])
    with pytest.raises(ConfigError, match="code ran"):
        VERBS[verb](folder, trust=True)


def test_the_command_says_it_in_one_line(folder, capsys):
    (folder / "config.yaml").write_text(CONFIGS[0])
    assert main(["eval", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'trap:make'" in line
    assert "--trust" in line
    assert main(["eval", str(folder), "--trust"]) == 2
    assert "code ran" in capsys.readouterr().err


def test_an_override_is_the_callers_own(folder):
    path = folder / "config.yaml"
    path.write_text("name: theirs")
    with pytest.raises(ConfigError, match="code ran"):
        load_untrusted(path, ["loss={factory: 'trap:make'}"])
    path.write_text("loss: {factory: 'trap:make'}")
    assert load_untrusted(path, ["loss=null"]).name
