"""`model: {hub: ...}`: sizes from the config.json of a snapshot, and its weights."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file

from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.models import Transformer
from axon_dist.train.app import export_run, run_model
from axon_dist.train.app.steps import model_of
from axon_dist.train.app.training import train
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig, describe
from axon_dist.weights import find_tensors, hub_config, load_weights
from tests.drawn import drawn

from ...weights import hub

WINDOWED = {**hub.LLAMA, "model_type": "mistral", "sliding_window": 4}


@pytest.fixture
def snapshot(tmp_path):
    return hub.write(tmp_path / "snapshot", WINDOWED, hub.llama_tensors(WINDOWED))


def test_sizes_and_weights_are_those_of_the_snapshot(snapshot):
    config = RunConfig.from_dict({"model": {"hub": str(snapshot), "max_length": 16}, **SHORT})
    assert config.model == hub_config(snapshot, max_length=16)
    assert config.model.windows == (4,)
    assert config.weights.files == (str(snapshot),)
    assert (config.weights.format, config.weights.cast) == ("hf-mistral", True)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict({**config.to_dict(), "weights": None}).weights is None
    plain = {"model": {"hub": str(snapshot)}, "weights": None, **SHORT}
    assert RunConfig.from_dict(plain).weights is None


SHORT = {"data": {"sequence_length": 16}}


def test_a_hub_value_that_is_no_snapshot_names_its_key(snapshot, tmp_path):
    for model, text in (
        ({"hub": str(tmp_path)}, "cannot open|no such|cannot read"),
        ({"hub": str(snapshot), "preset": "tiny"}, "got preset and hub, which both set sizes"),
        ({"hub": str(snapshot), "num_head": 3}, "model.num_head: there is no such key"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=text):
            RunConfig.from_dict({"model": model, "weights": None, **SHORT})
    assert describe("model.hub")[0].keys[0].meaning.startswith("a folder with config.json")


def test_an_export_has_the_tokens_of_the_run(snapshot, tmp_path, monkeypatch):
    def exported(config, name, **options):
        model = drawn(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
        monkeypatch.setattr(run_model, "load_model", lambda *_, **__: (model, config))
        export_run("run", tmp_path / name, "hf-mistral", tell=said.append, **options)
        written = json.loads((tmp_path / name / "config.json").read_text())
        return [written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")]

    said = []
    hub.write(snapshot, {**WINDOWED, "bos_token_id": 1, "eos_token_id": [2, 3]}, {})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (snapshot / name).write_text(name)
    chats = {"kind": "jsonl", "files": ["a.jsonl"], "tokenizer": str(snapshot / "tokenizer.json")}
    plain = {"model": {"hub": str(snapshot)}, "data": {**chats, "sequence_length": 16}}
    assert exported(RunConfig.from_dict(plain), "out") == [1, [2, 3], None]
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {"model.safetensors"}
    assert copied == {path.name for path in snapshot.iterdir()} - {"model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert said == ["the tensors are float32; --dtype bfloat16 halves the size"]

    (snapshot / "tokenizer.json").unlink()
    config, said = RunConfig.from_dict(plain), []
    exported(config, "moved", dtype="float32")
    assert [line.partition(":")[0] for line in said] == ["the tokenizer is not copied"]
    said = []
    assert exported(dataclasses.replace(config, weights=None), "drawn", dtype="float32")[1] is None
    assert said[0].startswith("config.json has no token ids: data.tokenizer=")
    said, on_bytes = [], RunConfig.from_dict({**plain, "weights": None, **SHORT})
    assert exported(on_bytes, "bytes", dtype="float32") == [None, 0, None]
    assert said == ["no tokenizer.json is written, because the run names no data.tokenizer"]


def with_adapters(snapshot, **changes):
    plain = {"model": {"hub": str(snapshot)}, **SHORT, "trainable": ["final_norm", "lora_a"]}
    return RunConfig.from_dict({**plain, "lora": {"rank": 2, "paths": ["/q"]}, **changes})


def moved_from(config):
    """Returns a config's model, with adapters and norms that differ from their initial values."""
    model = drawn(lambda: model_of(config))
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable[...] = variable[...] + 1
    return model


def test_adapters_alone_are_those_of_peft(snapshot, tmp_path, monkeypatch):
    config = with_adapters(snapshot)
    model = moved_from(config)
    monkeypatch.setattr(run_model, "run_config", lambda *_, **__: config)
    monkeypatch.setattr(run_model, "load_model", lambda *_, **__: (model, config))
    assert main(["export", "run", str(tmp_path / "out"), "--adapters"]) == 0
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["target_modules"]) == (2, ["q_proj"])
    assert written["modules_to_save"] == ["model.norm"]
    assert written["base_model_name_or_path"] == str(snapshot)
    again = load_weights(lambda: model_of(config), [snapshot, tmp_path / "out"], "hf-mistral")
    found, wanted = (dict(nnx.to_flat_state(nnx.state(x, nnx.Param))) for x in (again, model))
    kept = [keys for keys in wanted if "lora" in keys or "final_norm" in keys]
    assert len(kept) == 2 * config.model.num_layers + 1
    for keys in kept:
        np.testing.assert_array_equal(found[keys][...], wanted[keys][...])


@pytest.mark.parametrize(
    ("changes", "options", "code"),
    [
        ({"lora": None, "trainable": []}, {}, "no-adapters"),
        ({"weights": None}, {}, "no-format"),
        ({}, {"max_file": 100}, "adapters-in-files"),
    ],
)
def test_adapters_that_cannot_be_written(changes, options, code, snapshot, tmp_path, monkeypatch):
    config = with_adapters(snapshot, **changes)
    monkeypatch.setattr(run_model, "run_config", lambda *_, **__: config)
    with pytest.raises(ConfigError) as caught:
        export_run("run", tmp_path / "out", adapters=True, **options)
    assert caught.value.code == code


@pytest.mark.full
def test_a_run_that_starts_from_a_snapshot_and_its_export(tiny, tmp_path):
    sizes = {**WINDOWED, "vocab_size": 256}
    folder = hub.write(tmp_path / "snapshot", sizes, hub.llama_tensors(sizes))
    plain = {**tiny, "model": {"hub": str(folder)}, "mesh": "fsdp=8", "parallel": "full_shard",
             "optimizer": {"name": "sgd", "learning_rate": 1e-12}}  # fmt: skip
    run = train(RunConfig.from_dict(plain), Console(quiet=True)).directory.path
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf-mistral"]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == hub.llama_tensors(sizes).keys()
    for name, value in hub.llama_tensors(sizes).items():
        np.testing.assert_allclose(written[name], value, atol=1e-6)
    kept = hub_config(tmp_path / "out", scan_layers=False)
    assert kept.windows == (4,)


def test_a_repository_is_fetched_by_the_library_of_the_hub(snapshot, monkeypatch):
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options["revision"], options["allow_patterns"]))
        if name != "org/name":
            raise OSError("404")
        return str(snapshot)

    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    assert hub_config("hf://org/name") == hub_config(snapshot)
    assert asked == [("org/name", None, ["config.json"])]
    assert find_tensors("hf://org/name@v2").keys() == find_tensors(snapshot).keys()
    assert asked[-1][1] == "v2"
    with pytest.raises(CheckpointError, match=r"cannot fetch 'hf://org/other': 404; check the"):
        find_tensors("hf://org/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install -e '.*\[hub\]', or name a local"):
        find_tensors("hf://org/name")
