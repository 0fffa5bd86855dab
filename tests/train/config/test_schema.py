import argparse
import dataclasses
import inspect

import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.models import TransformerConfig
from axon_dist.parallel import STRATEGIES
from axon_dist.train.app.steps import config_facts
from axon_dist.train.cli.main import RENAMED_KEYS, _check_keys
from axon_dist.train.config import DATA, MODELS, OPTIMIZERS, RunConfig
from axon_dist.train.config.schema import read_strategies, strategy_options
from axon_dist.train.config.sections import LOGGERS, TrainConfig, Wandb

FULL = {
    "name": "full",
    "seed": 3,
    "mesh": {"dp": 2, "tp": -1},
    "devices": {"emulate": 8},
    "model": {"kind": "transformer", "preset": "tiny", "num_layers": 1},
    "data": {"files": ["a.txt"], "sequence_length": 16},
    "optimizer": {"name": "sgd", "momentum": 0.9, "schedule": {"name": "linear"}},
    "parallel": {"ddp": {"bucket_capacity": 1000}},
    "precision": {"compute": "bfloat16"},
    "remat": {"interval": 2, "classes": ["Block"]},
    "loss_scale": {"growth_interval": 5},
    "train": {"steps": 7, "global_batch": 8, "accumulate": 2, "clip_norm": None},
    "loggers": ["tensorboard", {"name": "wandb", "project": "p"}],
}


def test_round_trip_through_plain_data():
    config = RunConfig.from_dict(FULL)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.to_dict() != RunConfig().to_dict()
    assert RunConfig.from_dict(RunConfig().to_dict()) == RunConfig()


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_of_every_model(kind):
    data = "text" if kind == "transformer" else "synthetic_images"
    sizes = {"image_size": 16} if kind == "vit" else {}
    written = {"model": {"kind": kind, "preset": "tiny"}, "data": {"kind": data, **sizes}}
    config = RunConfig.from_dict(written)
    assert (config.kind, config.to_dict()["data"]["kind"]) == (MODELS[kind], data)
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip_of_every_optimizer(name):
    config = RunConfig.from_dict({"optimizer": name})
    assert config.to_dict()["optimizer"]["name"] == name
    assert RunConfig.from_dict(config.to_dict()) == config


def test_a_preset_is_spelled_out():
    written = RunConfig.from_dict(FULL).to_dict()["model"]
    sizes = dataclasses.asdict(TransformerConfig.preset("tiny", num_layers=1))
    assert written == {"kind": "transformer"} | sizes | {"windows": list(sizes["windows"])}


def test_shorthands():
    one = RunConfig.from_dict({"parallel": "ddp", "mesh": "dp=4", "loggers": "wandb"})
    assert (dict(one.parallel), one.mesh.shape, one.loggers) == ({"ddp": {}}, {"dp": 4}, (Wandb(),))
    assert dict(RunConfig.from_dict({"parallel": ["ddp"]}).parallel) == {"ddp": {}}
    assert dict(RunConfig.from_dict({"parallel": {"ddp": None}}).parallel) == {"ddp": {}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"optimiser": {}}, r"^optimiser: there is no such key. Did you mean 'optimizer'\?"),
        ({"train": {"step": 1}}, r"^train.step: there is no such key. Did you mean 'steps'\?"),
        (
            {"train": {"steps": -1}},
            r"^train.steps: got -1, which must be a whole number, at least 1",
        ),
        (
            {"train": {"global_batch": 0}},
            r"^train.global_batch: got 0, which must be a whole number, at least 1",
        ),
        ({"seed": -1}, r"^seed: got -1, which must be a whole number in \[0, 2\^32\)"),
        ({"mesh": {"dp": 0}}, r"^mesh: mesh axis 'dp' has size 0; it must be a positive number"),
        ({"mesh": {"fdsp": 2}}, r"^mesh: unknown mesh axis 'fdsp'. Did you mean 'fsdp'\?"),
        ({"mesh": 8}, r"^mesh: got 8, which must be axes and sizes, such as dp=8 or \{dp: 8\}"),
        (
            {"mesh": {"dp": "8"}},
            r"^mesh: mesh axis 'dp' has size '8'; it must be a positive number",
        ),
        (
            {"devices": {"emulate": -2}},
            r"^devices.emulate: got -2, .* whole number, at least 1",
        ),
        ({"model": {"kind": "transformr"}}, r"^model.kind: .* Did you mean 'transformer'\?"),
        ({"model": {"num_heads": 3}}, r"^model: width=128 does not divide by num_heads=3"),
        ({"model": {"preset": "gpt2-12m"}}, r"^model.preset: .* Did you mean 'gpt2-124m'\?"),
        ({"optimizer": "adanw"}, r"^optimizer.name: there is no 'adanw'. Did you mean 'adamw'\?"),
        ({"optimizer": {"name": "sgd", "b1": 0.9}}, r"^optimizer.b1: there is no such key. Valid"),
        ({"optimizer": {"schedule": "cosin"}}, r"^optimizer.schedule.name: .* 'cosine'\?"),
        ({"parallel": "dpp"}, r"^parallel.dpp: there is no such strategy. Did you mean 'ddp'\?"),
        ({"parallel": ["tp", "sequence"]}, r"got tp and sequence, which are both tensor"),
        ({"parallel": {"sp": {"sequence": False}}}, r"sequence: False under sp, .* write tensor"),
        (
            {"parallel": ["ddp", "tensor", "ddp"]},
            r"^parallel: got \['ddp', 'tensor', 'ddp'\], in which ddp appears twice; .* it once",
        ),
        (
            {"parallel": ["ddp", "pipeline"]},
            r"^parallel.pipeline needs num_microbatches: the parts that a batch is cut "
            r"into; write parallel: \{pipeline: \{num_microbatches: 8\}\}$",
        ),
        (
            {"parallel": {"pipeline": {"schedule": "1f1b"}}},
            r"^parallel.pipeline needs num_microbatches",
        ),
        ({"parallel": {}}, r"^parallel: got \{\}, which must be a strategy"),
        ({"parallel": {"ddp": 3}}, r"^parallel: ddp has 3 under it, which must be a section"),
        (
            {"parallel": {"ddp": {"bucket": 1}}},
            r"^parallel.ddp.bucket: there is no such option. Did you mean 'bucket_capacity'\?",
        ),
        ({"parallel": {"ddp": {"sync": "often"}}}, r"^parallel.ddp.sync: there is no 'often'"),
        ({"precision": "bf17"}, r"^precision: got 'bf17'. Did you mean 'bf16'\?"),
        ({"precision": {"comput": "bf16"}}, r"^precision.comput: .* Did you mean 'compute'\?"),
        (
            {"precision": {"compute": "int8"}},
            r"^precision: compute dtype is 'int8'; it must be a fl",
        ),
        ({"precision": 16}, r"^precision: got 16, which must be a string"),
        ({"remat": {"interval": 0}}, r"^remat: checkpoint interval is 0; it must be at least 1"),
        ({"loss_scale": {"growth_factor": 1}}, r"^loss_scale: "),
        ({"loggers": "wandbb"}, r"^loggers\[0\].name: .* Did you mean 'wandb'\?"),
        ({"data": {"validation_fraction": 2.0}}, r"^data.validation_fraction=2.0 must be between"),
        ({"name": "a/b"}, r"^name: got 'a/b', which must be usable as a folder name"),
        (
            {"data": {"sequence_length": 2000}},
            r"^data.sequence_length: got 2000, which must not exceed model.max_length=1024",
        ),
        (
            {"model": "resnet"},
            r"^data.kind: got text, but the model is a resnet, which needs images, image_f",
        ),
        (
            {"data": {"kind": "images", "files": ["a.npz"]}},
            r"^data.kind: got images, but the model is a transformer, which needs text, t",
        ),
        ({"data": "image"}, r"^data.kind: there is no 'image'. Did you mean 'images'\?"),
        ({"model": "vit", "data": "images"}, r"^data.files names no file"),
        ({"data": {"kind": "images", "tokenizer": "a"}}, r"^data.tokenizer: there is no such key"),
        (
            {"model": "vit", "data": {"kind": "synthetic_images", "image_size": 32}},
            r"^data.image_size: got 32, which must be model.image_size=224; change one",
        ),
        (
            {"model": "resnet", "data": "synthetic_images", "train": {"peak_flops": 1e12}},
            r"^train.peak_flops: got 1\d+.0, .* per parameter and token, which images do not have",
        ),
        (
            {"train": {"global_batch": 8, "accumulate": 3}},
            r"^train.accumulate: got 3 microbatches, which must divide train.global_batch=8",
        ),
        (
            {"train": {"steps": 5}, "optimizer": {"schedule": {"warmup_steps": 5}}},
            r"lower optimizer.schedule.warmup_steps or raise train.steps",
        ),
    ],
)
def test_mistakes(data, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(data)


def schema_types(value):
    """Returns the dataclasses that a config can consist of, including all variants."""
    yield RunConfig
    yield from (type(getattr(value, f.name)) for f in dataclasses.fields(value))
    yield from (kind.sizes for kind in MODELS.values())
    for table in (DATA, OPTIMIZERS, LOGGERS):
        yield from table.values()


def test_a_trace_that_waits_for_a_signal_may_be_longer_than_the_run():
    train = {"steps": 1, "profile": {"at": 0}}
    assert RunConfig.from_dict({"train": train}).train.profile.steps == 3
    with pytest.raises(ConfigError, match=r"got at=1 and steps=3, but the run ends with step 1"):
        RunConfig.from_dict({"train": train | {"profile": {"at": 1}}})


def test_every_section_is_frozen():
    for cls in schema_types(RunConfig()):
        if dataclasses.is_dataclass(cls):
            assert cls.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("full_shard", {"fsdp": {}}),
        ("FSDP2", {"fsdp": {}}),
        (["hsdp", "tp"], {"hybrid": {}, "tensor": {}}),
        ({"sequence": {"rings": True}}, {"tensor": {"sequence": True, "rings": True}}),
        ({"pipelined": {"num_microbatches": 4}}, {"pipeline": {"num_microbatches": 4}}),
        (["ddp", "context_parallel"], {"ddp": {}, "context": {}}),
    ],
)
def test_a_strategy_is_known_by_its_names(written, read):
    assert strategy_options(written) == read


def test_a_config_key_works_by_its_old_name():
    def config(**reduction):
        return RunConfig.from_dict({"parallel": {"fsdp": {"reduction": reduction}}})

    with pytest.warns(DeprecationWarning, match="Reduction.by_hand is deprecated; use manual"):
        old = config(by_hand=True)
    assert old == config(manual=True)
    assert old != config()
    with pytest.warns(DeprecationWarning, match="layer_norms is deprecated; use norms_by_layer"):
        old = RunConfig.from_dict({"train": {"layer_norms": True}})
    assert old == RunConfig.from_dict({"train": {"norms_by_layer": True}})


def test_the_command_accepts_the_old_names_of_keys(tmp_path):
    renamed = {f"train.{old}" for old in TrainConfig._new_name_of}
    assert renamed == RENAMED_KEYS
    config = tmp_path / "old.yaml"
    config.write_text("train: {layer_norms: true}")
    _check_keys(argparse.Namespace(config=str(config), overrides=["train.layer_norms=false"]))


def test_every_other_name_means_one_strategy():
    names = [name for row in STRATEGIES.values() for name in row.other_names]
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint(STRATEGIES.rows)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_option_without_a_default_is_explained(name):
    required = [
        key
        for key, parameter in inspect.signature(STRATEGIES[name].make).parameters.items()
        if key not in ("model", "world") and parameter.default is parameter.empty
    ]
    if not required:
        assert read_strategies({name: {}}) == {name: {}}
        return
    with pytest.raises(ConfigError, match=rf"needs {required[0]}: .*: {{{required[0]}: \d+}}"):
        read_strategies({name: {}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": [], "weights": []}, r"^data.weights: got \[\] for 0 sources; give one numbe"),
        ({"sources": ["text"], "weights": [1, 2]}, r"^data.weights: got \[1.0, 2.0\] for 1 source"),
        ({"sources": ["images"], "weights": [1]}, r"^data.sources\[0\].kind: there is no 'images'"),
        (
            {"sources": ["text"], "weights": [0]},
            r"^data.weights\[0\]: got 0.0, which must be a number, at least 1e-37",
        ),
        (
            {"sources": ["text", {"kind": "tokens", "files": ["a"]}], "weights": [1, 1]},
            r"^data.sources: got losses in nats/byte and nats/token, which cannot be mixed",
        ),
        (
            {
                "sources": [{"kind": "text", "tokenizer": name} for name in ("a", "b")],
                "weights": [1, 1],
            },
            r"^data.sources: got the tokenizers a and b, whose tokens mean different thing",
        ),
    ],
)
def test_mixtures_that_cannot_be(data, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict({"data": {"kind": "mixture"} | data})


def test_round_trip_of_a_mixture_and_what_processes_must_have_in_common():
    sources = [{"kind": "jsonl", "files": ["a"], "prompt": "q", "response": "r"}, "text"]
    plain = {"data": {"kind": "mixture", "sources": sources, "weights": [2, 1]}}
    config = RunConfig.from_dict(plain)
    assert RunConfig.from_dict(config.to_dict()) == config
    fields = config.kind.task.fields(config.model, config.data)
    assert {name: field.dtype for name, field in fields.items()} == {
        "tokens": np.int32, "segments": np.int32, "mask": np.int8
    }  # fmt: skip
    plain["data"]["sources"] = [sources[0] | {"files": ["elsewhere"]}, "text"]
    assert config_facts(RunConfig.from_dict(plain)) == config_facts(config)


@pytest.mark.parametrize(
    "differ",
    [
        lambda host: {"loggers": [{"name": "prometheus", "file": f"/{host}/metrics.prom"}]},
        lambda host: {"validation": {"code": [f"/{host}/*.py"]}},
        lambda host: {"data": {"kind": "text", "files": [f"/{host}/*.txt"]}},
    ],
    ids=["logger", "validation", "data"],
)
def test_paths_may_differ_between_hosts(differ):
    facts = [config_facts(RunConfig.from_dict(differ(host))) for host in ("first", "second")]
    assert facts[0] == facts[1]


def test_named_validations_are_the_same_on_all_hosts():
    facts = [config_facts(RunConfig.from_dict({"validation": {name: ["a"]}})) for name in "ab"]
    assert facts[0] != facts[1]


def test_a_profile_of_a_first_step_is_read_and_warned_of():
    """The folder of an earlier run may have it, and SIGUSR1 still traces."""
    train = {"steps": 9, "profile": {"at": 1, "steps": 1}}
    with pytest.warns(UserWarning, match="got at=1 and steps=1, which trace nothing"):
        profile = RunConfig.from_dict({"train": train}).train.profile
    assert profile.traces_nothing
    others = ({"at": 1, "steps": 2}, {"at": 2, "steps": 1}, {"at": 0, "steps": 1})
    for other in others:
        made = RunConfig.from_dict({"train": {**train, "profile": other}})
        assert not made.train.profile.traces_nothing
