import dataclasses
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import BackendStartedError, ConfigError, MeshError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.mesh import MeshSpec
from axon_dist.models import Transformer, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.ops.precision import MixedPrecision
from axon_dist.train.app import train
from axon_dist.train.app.runs import build_run
from axon_dist.train.app.steps import build_step, build_world, names_on, warn_of_vanishing
from axon_dist.train.config import LOGGERS, RunConfig, build_strategy, with_own_precision
from axon_dist.train.loop import SilentProgress
from tests.words import WORDS


@pytest.mark.full
def test_the_run_is_what_one_device_trains(tiny):
    tiny["optimizer"] = {"name": "sgd", "learning_rate": 0.5, "schedule": "constant"}
    tiny["train"] |= {"steps": 3, "log_every": 1, "clip_norm": 0.2, "accumulate": 1}
    run = build_run(RunConfig.from_dict(tiny))
    result = run.trainer(SilentProgress(), (), lambda *saving: None).fit()

    config = run.config
    model = Transformer(config.model, rngs=nnx.Rngs(config.seed))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss_fn = lambda p, batch: next_token_loss(nnx.merge(graph, p, rest), batch).mean
    step = jax.jit(jax.value_and_grad(loss_fn))
    optimizer = optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.5))
    state = optimizer.init(params)
    again = build_run(config).loader
    for _, loss in result.train_curve:
        expected, grads = step(params, next(again))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)


@pytest.mark.full
def test_seeds_change_weights_and_order(tiny):
    first, second = (build_run(RunConfig.from_dict(tiny | {"seed": seed})) for seed in (0, 1))
    assert not np.array_equal(next(first.loader)["tokens"], next(second.loader)["tokens"])
    leaves = [jax.tree.leaves(run.step.init().params) for run in (first, second)]
    assert any(not np.array_equal(*pair) for pair in zip(*leaves, strict=True))


def test_units(tiny):
    run = build_run(RunConfig.from_dict(tiny))
    assert (run.unit, run.items_per_step, run.item) == ("nats/byte", 8 * 16, "tokens")
    data = dataclasses.replace(run.config.data, tokenizer="x.json")
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    assert run.unit == "nats/token"


def test_the_world_takes_what_there_is_without_emulation():
    assert build_world(RunConfig.from_dict({"mesh": "dp=-1"})).size == 8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mesh": "dp=3"}, MeshError, r"mesh dp=3 needs 3 devices and got 8"),
        ({"mesh": "tp=8"}, MeshError, r"add dp or fsdp, such as mesh=fsdp=1,tp=8"),
        ({"devices": {"emulate": 16}}, BackendStartedError, r"wanted 16 emulated devices"),
        (
            {"train": {"global_batch": 12}},
            ConfigError,
            r"train.global_batch: got 12 samples, which do not divide over mesh dp=8 with "
            r"num_microbatches=1; make it a multiple of 8, such as 16",
        ),
        ({"train": {"global_batch": 8, "accumulate": 2}}, ConfigError, r"a multiple of 16, such a"),
        (
            {"data": {"files": ["/none/*.txt"]}},
            ConfigError,
            r"data.files: '/none/\*.txt' matches",
        ),
        (
            {"model": {"vocab_size": 100}},
            ConfigError,
            r"model.vocab_size: got 100, but the data has tokens up to 255; set it to at least 256",
        ),
    ],
)
def test_configs_that_cannot_be_built_raise(tiny, changes, error, message):
    for section, values in changes.items():
        merged = {**tiny[section], **values} if isinstance(values, dict) else values
        tiny[section] = merged
    if "files" in changes.get("data", {}):
        del tiny["data"]["validation_files"]
    with pytest.raises(error, match=message):
        build_run(RunConfig.from_dict(tiny))


def test_strategy_options_arrive(tiny, make_world):
    world = make_world("dp=2,fsdp=4")
    options = {"sync": "overlapped", "bucket_capacity": 123, "reduce_dtype": "bfloat16"}
    strategy = build_strategy({"ddp": options}, None, world)
    assert strategy.batch_axes == ("dp", "fsdp")
    assert strategy.reduction.bucket_capacity == 123
    assert strategy.reduction.sync.name == "OVERLAPPED"
    config = RunConfig.from_dict(tiny | {"mesh": "dp=2,fsdp=4", "parallel": {"ddp": options}})
    assert build_step(config, world).strategy.reduction == dataclasses.replace(
        strategy.reduction, per="step"
    )


def test_precision_remat_and_loss_scale_arrive(tiny, world):
    sections = {
        "precision": "bf16", "remat": {"interval": "sqrt"}, "loss_scale": {"init_scale": 8.0}
    }  # fmt: skip
    step = build_step(RunConfig.from_dict(tiny | sections), world)
    assert step.strategy.precision == MixedPrecision.bf16()
    assert step.strategy.remat == ActivationCheckpointing("sqrt")
    assert float(step.init().scaler.scale) == 8.0


def test_weights_that_travel_in_fp8_are_asked_for_in_the_config(tiny, world):
    asked = {"precision": {"compute": "bfloat16", "products": "fp8", "gather": "fp8"}}
    config = RunConfig.from_dict(tiny | asked | {"mesh": "fsdp=8", "parallel": "full_shard"})
    assert RunConfig.from_dict(config.to_dict()).precision == MixedPrecision.fp8(gather="fp8")
    with pytest.raises(ConfigError, match=r"^precision: gather='fp8' gathers the weights"):
        RunConfig.from_dict({"precision": {"gather": "fp8"}})


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_logger_that_is_not_installed(tiny, tmp_path, monkeypatch, logger):
    monkeypatch.setitem(sys.modules, LOGGERS[logger].module, None)
    message = r"the logger \w+ needs the module .*; run: pip install -e '.*\[loggers\]'"
    with pytest.raises(ConfigError, match=message):
        train(RunConfig.from_dict(tiny | {"loggers": [logger]}))
    assert not (tmp_path / "run").exists()


def test_trainable_is_a_config_key(tiny):
    tiny |= {"trainable": "attention/", "frozen_dtype": "bfloat16"}
    tiny["train"] |= {"ema": 0.5}
    config = RunConfig.from_dict(tiny)
    assert RunConfig.from_dict(config.to_dict()) == config
    step = build_step(config, build_world(config))
    trained, frozen = (jax.tree.leaves(x) for x in (step.model_spec.params, step.model_spec.frozen))
    assert {path.split("/")[2] for path, _ in leaves_with_paths(step.model_spec.params)} == {
        "attention"
    }
    assert {x.dtype for x in trained} == {np.dtype("float32")}
    assert {x.dtype for x in frozen} == {np.dtype("bfloat16")}
    assert step.options.ema == 0.5
    other = RunConfig.from_dict(tiny | {"trainable": ["attention", "tail"]})
    with pytest.raises(ConfigError, match="trainable='tail' finds nothing in the model"):
        build_step(other, build_world(other))


def test_options_of_the_compiler_reach_the_step_and_a_wrong_one_is_named(tiny, chip):
    """They override those of the chip, null removes one, and `build_step` overrides both."""
    passes, _ = chip.options[0]
    tiny["model"] = WORDS
    for given in ({"xla_cpu_enable_fast_math": False}, {passes: None}):
        config = RunConfig.from_dict(tiny | {"compiler_options": given})
        assert RunConfig.from_dict(config.to_dict()) == config
        world = build_world(config)
        found = build_step(config, world).compiler_options
        expected = {passes: "algsimp", **given}
        assert found == {name: x for name, x in expected.items() if x is not None}
    last = build_step(config, world, compiler_options={passes: "dce"})
    assert last.compiler_options == {passes: "dce"}
    for given, message in (
        ({"xla_bogus": 1}, r"emulated devices refuses its options.*'xla_bogus'"),
        ({passes: [1]}, r"compiler_options has 'xla_disable_hlo_passes': \[1\]; names must be"),
    ):
        config = RunConfig.from_dict(tiny | {"compiler_options": given})
        with pytest.raises(ConfigError, match=message) as error:
            build_step(config, world)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^compiler_options: got 3, which must be a section"):
        RunConfig.from_dict(tiny | {"compiler_options": 3})


def test_updates_that_vanish_in_the_dtype_of_the_weights_are_told():
    stored = {"w": jax.ShapeDtypeStruct((4,), "bfloat16")}
    step = types.SimpleNamespace(abstract_state=types.SimpleNamespace(params=stored))
    slow = RunConfig.from_dict({"optimizer": {"name": "adamw", "learning_rate": 1e-5}})
    with pytest.warns(UserWarning, match=r"stored in bfloat16, and updates of 1e-05"):
        warn_of_vanishing(slow, step)
    # A weight above the warning's limit does not change, and a small one does.
    for weight, moves in ((0.0053, False), (0.001, True)):
        number = np.asarray(weight, jax.numpy.bfloat16)
        assert (number + np.asarray(1e-5, number.dtype) != number) == moves
    fast = RunConfig.from_dict({"optimizer": {"name": "adamw", "learning_rate": 1e-3}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_vanishing(fast, step)


@pytest.mark.parametrize(
    ("steps", "schedule", "is_flat"),
    [(4, {}, True), (2, {}, True), (8, {}, False), (4, {"decay_fraction": 0.0}, False)],
)
def test_a_decay_that_no_step_has_is_warned_of(tiny, make_world, steps, schedule, is_flat):
    """The first step of the decay still has the peak."""
    tiny["optimizer"] |= {"schedule": {"name": "wsd", **schedule}}
    tiny["train"] |= {"steps": steps, "eval_every": 0}
    config = RunConfig.from_dict(tiny)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_step(config, make_world("dp=8"))
    messages = [str(one.message) for one in caught]
    assert [f"of train.steps={steps} is" in one for one in messages] == [True] * is_flat
    rates = config.optimizer.rates(steps)
    assert (len({*rates.tolist()}) == 1) == (is_flat or not schedule.get("decay_fraction", 1))


def test_names_of_axes_are_a_key(tiny, make_world):
    tiny |= {"axis_names": {"rows": ["dp"], "heads": []}, "mesh": "dp=2"}
    step = build_step(RunConfig.from_dict(tiny), make_world("dp=2"), trains=False)
    assert step.axis_names.meant("rows") == ("dp",)
    assert step.axis_names.meant("heads") == ()


@pytest.mark.parametrize(
    ("own", "other", "given", "meant"),
    [
        ("dp=4", "fsdp=2,tp=2", ("dp",), ("fsdp",)),
        ("fsdp=4", "dp=2,fsdp=2", "fsdp", ("dp", "fsdp")),
        ("dp=-1", "nodes=2,dp=1,ep=2", ("dp",), ("nodes", "dp", "ep")),
        ("dp=2,tp=2", "fsdp=4,tp=2", ("dp", "tp"), ("fsdp", "tp")),
        ("dp=2,tp=2", "dp=4", ("dp", "tp"), ("dp",)),
        ("dp=2,tp=2", "fsdp=4", "tp", ()),
        # Only some of the data axes: a name of something else than the batch.
        ("dp=2,fsdp=2", "fsdp=4", ("dp",), ()),
        ("dp=2,fsdp=2", "dp=4,tp=2", ("fsdp",), ()),
        # Nothing splits the batch, so no name is one of the batch by its axes alone.
        ("dp=1,tp=2", "fsdp=2,tp=2", "tp", "tp"),
        # The user's own choice stays on a mesh of the same axes.
        ("dp=2,ep=2", "dp=4,ep=2", ("dp",), ("dp",)),
        ("dp=2,fsdp=2", "dp=2,fsdp=2,tp=2", ("fsdp", "dp"), ("fsdp", "dp")),
    ],
)
def test_names_of_axes_mean_those_of_another_mesh(own, other, given, meant):
    own, other = map(MeshSpec.parse, (own, other))
    assert names_on({"name": given}, own, other) == {"name": meant}


@pytest.mark.parametrize("spelled", ["bf16", "bfloat16", "BF16"])
def test_a_config_keeps_the_one_name_of_a_precision(spelled):
    configs = [RunConfig.from_dict({"precision": spelled}), RunConfig(precision=spelled)]
    configs.append(RunConfig(precision=jnp.bfloat16))
    option = {"fsdp": {"mixed_precision": spelled}}
    configs.append(with_own_precision(RunConfig.from_dict({"parallel": option})))
    assert [config.precision for config in configs] == ["bf16"] * 4
    assert configs[0].to_dict()["precision"] == "bf16"


def test_names_of_enums_are_read_in_any_case():
    config = RunConfig.from_dict({"train": {"nonfinite": "Skip"}, "checkpoint": {"type": "FULL"}})
    assert config == RunConfig.from_dict(
        {"train": {"nonfinite": "skip"}, "checkpoint": {"type": "full"}}
    )
