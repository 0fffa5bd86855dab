"""The verdict of `verify` on two runs that differ."""

import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp, local_sgd
from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import hardware
from axon_dist.ops.precision import MixedPrecision
from axon_dist.train.app import config_plans, plan_config, verify
from axon_dist.train.app.evaluate import world_of
from axon_dist.train.app.steps import build_step, build_world
from axon_dist.train.app.verify import (
    COMPARED,
    EXACT,
    ROUNDED,
    Difference,
    Verification,
    _compare,
    _train,
    one_device_step,
    tiny,
    tolerance_of,
    train_replicas,
)
from axon_dist.train.config import RunConfig
from tests.words import WORDS


def verification(*params: Difference, tolerance: float = 1e-5) -> Verification:
    return Verification("ddp", "dp=2", (Difference("loss of step 0", 0.0),), params, tolerance)


def differences(got, want):
    pairs = zip(got, want, strict=True)
    names = {f"p{i}": pair for i, pair in enumerate(pairs)}
    seen, expected = ({k: np.asarray(v[i]) for k, v in names.items()} for i in (0, 1))
    return [row.relative for row in _compare(seen, expected)]


def test_differences_are_relative_to_the_largest_element():
    assert differences([[1.0, 100.5]], [[0.5, 100.0]]) == pytest.approx([0.005])
    assert differences([[0.0, 0.0]], [[0.0, 0.0]]) == [0]


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([math.nan, 2.0], [math.nan, 2.0]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([math.inf, 1.0], [math.inf, 1.0]),
    ],
)
def test_non_finite_values_are_never_equal(got, want):
    assert differences([got], [want]) == [math.inf]


def test_one_row_beyond_the_tolerance_is_enough_wherever_it_is():
    near, far = Difference("a", 1e-6), Difference("b", 1e-4)
    assert verification(near).passed
    for rows in ([near, far], [far, near]):
        assert not verification(*rows).passed
        assert verification(*rows).worst is far
    assert not verification(near, Difference("c", math.inf)).passed


def test_a_row_that_fails_is_worse_than_a_farther_one_that_rounding_explains():
    failing, explained = Difference("a", 2e-5), Difference("b", 1e-3, rounding=1e-3)
    found = verification(explained, failing)
    assert found.worst is failing
    assert found.ranked(found.params) == [failing, explained]


def test_a_row_may_be_off_by_a_few_times_what_rounding_moves_one_device_by():
    """But only up to a limit: a model that rounding alone changes much proves nothing."""
    assert not Difference("a", 2e-5).passes(1e-5)
    assert Difference("a", 2e-5, rounding=6e-6).passes(1e-5)
    assert not Difference("a", 3e-5, rounding=6e-6).passes(1e-5)
    assert not Difference("a", 2e-3, rounding=1.0).passes(1e-5)
    assert not Difference("a", math.nan, rounding=1.0).passes(1e-5)


@pytest.mark.parametrize(
    ("open_mesh", "mesh", "parallel"),
    [
        ("dp=-1", "dp=8", "ddp"),
        ("dp=-1,tp=2", "dp=4,tp=2", {"ddp": {}, "tensor": {}}),
        ("pp=-1", "pp=8", {"pipeline": {"num_microbatches": 4}}),
        ("dp=2,pp=-1", "dp=2,pp=4", {"ddp": {}, "pipeline": {"num_microbatches": 4}}),
    ],
)
def test_a_tiny_config_of_an_open_axis_is_that_of_its_size(open_mesh, mesh, parallel):
    def small(axes):
        config = {"mesh": axes, "parallel": parallel, "model": {"num_layers": 32}}
        return tiny(RunConfig.from_dict({**config, "train": {"global_batch": 64}}))

    found, expected = small(open_mesh), small(mesh)
    assert found.train.global_batch == expected.train.global_batch < 64
    assert found.model.num_layers == expected.model.num_layers < 32
    assert found.data.sequence_length == expected.data.sequence_length


SMALL = {
    "devices": {"emulate": 2},
    "mesh": "dp=2",
    "data": {"max_bytes": 20000, "sequence_length": 16},
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "ffn_width": 16},
    "train": {"global_batch": 4, "steps": 10},
}


@pytest.mark.parametrize("watch", [{}, {"norms_by_layer": True}, {"spikes": {"deviations": 5}}])
def test_a_step_with_another_optimizer_clips_as_the_config_says(watch):
    train = {**SMALL["train"], "clip_norm": 0.05, **watch}
    config = RunConfig.from_dict({**SMALL, "train": train})
    world = build_world(config)
    assert build_step(config, world, optax.sgd(0.1)).options.clip_norm == 0.05
    assert one_device_step(config, world, 1, optax.sgd(0.1)).options.clip_norm == 0.05
    # The step of the config's own optimizer clips too, whatever watches that optimizer: only a step
    # that clips knows that a norm which overflows is not finite.
    assert build_step(config, world).options.clip_norm == 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"train": {**SMALL["train"], "clip_norm": 0.05, "norms_by_layer": True}},
        {"mesh": "fsdp=2", "parallel": {"fsdp": {"mixed_precision": "bf16"}}},
    ],
)
def test_options_of_another_section_change_both_runs(change):
    assert verify(RunConfig.from_dict({**SMALL, **change}), steps=2).passed


@pytest.mark.full
def test_replicas_with_other_numbers_of_learned_tokens_are_compared_by_their_tokens(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"q": "a", "r": "b" * (1 + number % 8)} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"kind": "jsonl", "files": [str(path)], "prompt": "q", "response": "r", "packed": False}
    data["sequence_length"] = 11
    train = {**SMALL["train"], "nonfinite": "skip"}
    parts = {"mesh": "nodes=2", "parallel": {"local_sgd": {"every": 2}}, "data": data}
    parts["model"] = {**WORDS, "dropout": 0.0}
    found = verify(RunConfig.from_dict({**SMALL, "train": train, **parts}), steps=2)
    assert found.passed, found.worst


@pytest.mark.full
def test_the_loss_of_replicas_is_a_sum_if_the_loss_is_one():
    loss_fn = lambda model, batch: jnp.sum(model(batch["x"]) ** 2)
    model, world = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), World.emulate(2, "nodes=2")
    build = functools.partial(build_train_step, model, optax.sgd(0.001), loss_fn)
    options = {"metrics": COMPARED, "accumulate": 2}
    step = build(local_sgd("nodes", every=2), world, **options)
    alone = build(ddp(per="microbatch"), World.emulate(1, "dp=1"), **options)
    batches = [{"x": np.arange(32, dtype=np.float32).reshape(8, 4) / 32}]
    found = _compare(
        *(one[0] for one in (_train(step, batches), train_replicas(step, alone, batches)))
    )
    assert all(row.relative < 1e-5 for row in found)


@pytest.mark.full
def test_a_strategys_precision_is_that_of_the_config(monkeypatch):
    monkeypatch.setattr(config_plans, "MOST", 4)  # enough that a plan with fsdp is among them
    monkeypatch.setattr(config_plans, "FEW", 1)
    half = MixedPrecision.bf16()
    strategies = {"fsdp": {"mixed_precision": "bf16"}}
    config = RunConfig.from_dict({**SMALL, "mesh": "fsdp=2", "parallel": strategies})
    world = build_world(config)
    assert build_step(config, world, optax.sgd(0.1)).strategy.precision == half
    assert one_device_step(config, world, 1, optax.sgd(0.1)).strategy.precision == half
    alone, one = world_of(config, one_device=True)
    assert build_step(alone, one, optax.identity(), trains=False).strategy.precision == half

    plans = plan_config(config, hardware("h100"), 2)
    assert plans.work.policy == half
    assert {plan.config.precision for plan in (*plans.plans, *plans.others)} == {"bf16"}
    assert any("fsdp" in plan.config.parallel for plan in plans.plans)
    assert all("mixed_precision" not in str(plan.config.parallel) for plan in plans.plans)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"groups": [{"paths": ["blocks/5/"], "rate": 0.1}]}},
        {"trainable": ["blocks/5/"]},
        {"lora": {"paths": ["blocks/5/mlp/up"]}},
        {"parallel": {"tensor": {"plan": {"blocks/5/mlp/up$": "column"}}}, "mesh": "tp=2"},
        {"precision": {"products": "fp8", "skip": ["blocks/5/"]}},
        {"parallel": {"fsdp": {"mixed_precision": {"products": "fp8", "skip": ["blocks/5/"]}}}},
        {"deterministic": "elastic", "logical_shards": 16},
    ],
)
def test_what_a_config_names_is_in_its_tiny_one(make_world, change):
    plain = {**SMALL, "model": {"num_layers": 6}, "train": {"global_batch": 64}, **change}
    small = tiny(RunConfig.from_dict(plain))
    assert small.train.global_batch == (16 if "logical_shards" in change else 2)
    assert small.model.num_layers == (2 if "logical_shards" in change else 6)
    if "parallel" not in change:
        build_step(small, make_world("dp=2"), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [(None, EXACT), (False, EXACT), ({"compute": "float32"}, EXACT), ("bf16", ROUNDED)],
)
def test_runs_in_float32_are_exact_whoever_names_the_precision(precision, tolerance):
    options = {} if precision is None else {"mixed_precision": precision}
    assert tolerance_of(RunConfig.from_dict({"parallel": {"fsdp": options}})) == tolerance
    if precision is not False:
        assert tolerance_of(RunConfig.from_dict({"precision": precision})) == tolerance


def test_an_optimizer_that_a_run_refuses_is_not_verified():
    groups = [{"paths": ["no such layer"], "rate": 0.1}]
    config = RunConfig.from_dict({**SMALL, "optimizer": {"groups": groups}})
    with pytest.raises(ConfigError, match=r"groups\[0\].paths: no parameter of the model has"):
        verify(config, steps=1)
