"""`remat: auto`: the least is recomputed that fits, and the compiled step has the last word."""

import dataclasses
import functools
import importlib
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, build_train_step
from axon_dist.core.errors import ConfigError
from axon_dist.mesh import World, abstract_world
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import fsdp
from axon_dist.planner import read_step, recompute_least
from axon_dist.planner.reading import LADDER, SURE
from axon_dist.train.app import summary
from axon_dist.train.app.steps import build_step
from axon_dist.train.app.summary import remat_line
from axon_dist.train.config import RunConfig

build_module = importlib.import_module("axon_dist.step.step")
CONFIG = TransformerConfig(
    vocab_size=512, width=512, num_layers=4, num_heads=4, max_length=1024, scan_layers=True
)
BATCH = {"tokens": jax.ShapeDtypeStruct((64, 1025), jnp.int32)}


@functools.cache
def step_of(remat):
    return build_train_step(
        lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)), optax.adamw(1e-3), next_token_loss, fsdp(),
        abstract_world("fsdp=8", 8, "gpu", "9.0"), precision="bf16", remat=remat,
    )  # fmt: skip


@functools.cache
def reading_of(remat):
    return read_step(step_of(remat), BATCH)


def chosen(usable, peak=lambda step: 1):
    read = lambda step: reading_of(step.strategy.remat)
    return recompute_least(step_of, read, peak, usable).strategy.remat


@pytest.mark.full
def test_every_row_keeps_less_and_none_multiplies_less():
    readings = [reading_of(remat) for remat in LADDER.values()]
    peaks, flops = [one.peak for one in readings], [one.flops for one in readings]
    assert peaks == sorted(peaks, reverse=True)
    assert flops == sorted(flops)
    assert flops[0] < 0.8 * flops[-1]


@pytest.mark.parametrize("row", range(len(LADDER)))
def test_the_first_row_that_fits_is_taken(row):
    remat = list(LADDER.values())[row]
    assert chosen(reading_of(remat).peak) == remat


def test_the_compiled_step_is_consulted_last():
    first, second, *_ = LADDER.values()
    needed, peak = reading_of(first).peak, lambda step: 2**60 if step.strategy.remat == first else 1
    assert chosen(needed, peak) == second
    assert chosen(needed / SURE, peak) == first  # So far below, it is not compiled.


def test_nothing_fits():
    with pytest.raises(
        ConfigError, match=r"nothing that fits the 1 B .* recomputes nothing, .*acc"
    ):
        chosen(1)


TINY = {
    "mesh": "fsdp=8",
    "parallel": "full_shard",
    "model": {"num_layers": 2, "width": 32, "max_length": 64},
    "data": {"max_bytes": 100_000, "sequence_length": 64},
    "train": {"global_batch": 8, "steps": 2},
}


def emulated(monkeypatch, usable=None, **changes):
    """The step of the config on emulated devices, which are said to have so much memory."""
    if usable is not None:
        is_open = lambda step: step.strategy.remat is None
        monkeypatch.setattr(build_module, "leaves_remat_open", is_open)
        monkeypatch.setattr(build_module, "usable_bytes", lambda world: usable)
        monkeypatch.setattr(summary, "leaves_remat_open", is_open)
        monkeypatch.setattr(summary, "usable_bytes", lambda world: usable)
    config = RunConfig.from_dict({**TINY, **changes})
    return config, build_step(config, World.emulate(8, str(config.mesh)))


def test_auto_is_the_default_and_traces_nothing_where_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(build_module, "read_step", None)
    config, step = emulated(monkeypatch)
    assert RunConfig().remat == config.remat == "auto"
    assert RunConfig.from_dict(config.to_dict()).remat == "auto"
    assert step.strategy.remat is None
    assert remat_line(config, step) is None


@pytest.mark.sample("1-remat1")
@pytest.mark.parametrize(("row", "remat"), list(enumerate(LADDER.values())))
def test_a_step_is_built_for_its_batch(monkeypatch, row, remat):
    """The first row whose need is within the memory, as the traced step says it."""
    monkeypatch.setattr(build_module, "leaves_remat_open", lambda step: True)
    needs = [3 - list(LADDER.values()).index(one) for one in LADDER.values()]
    peaks = dict(zip(LADDER.values(), needs, strict=True))
    reading = lambda step, batch: types.SimpleNamespace(peak=peaks[step.strategy.remat])
    monkeypatch.setattr(build_module, "read_step", reading)
    monkeypatch.setattr(build_module, "memory", reading)
    monkeypatch.setattr(build_module, "usable_bytes", lambda world: needs[row] / SURE)
    config = dataclasses.replace(CONFIG, vocab_size=32, width=16, num_layers=2, max_length=8)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)}
    built = functools.partial(
        build_train_step, lambda: Transformer(config, rngs=nnx.Rngs(0)), optax.sgd(0.1),
        next_token_loss, fsdp(), abstract_world("fsdp=8", 8, "gpu", "9.0"),
    )  # fmt: skip
    assert built(batch=batch).strategy.remat == remat
    assert built().strategy.remat is None
    assert built(batch=batch, remat=None).strategy.remat is None


@pytest.mark.full
def test_a_config_says_auto_and_is_told_what_it_got(monkeypatch):
    config, step = emulated(monkeypatch, usable=2**40)
    assert step.strategy.remat is None
    assert "remat: auto recomputes nothing: " in remat_line(config, step)
    assert "fewer FLOPs than recomputing every block" in remat_line(config, step)
    assert remat_line(dataclasses.replace(config, remat=None), step) is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "remat"),
    [
        ({"mesh": "pp=2,dp=4", "parallel": {"pipeline": {"num_microbatches": 2}, "ddp": {}}}, None),
        (
            {"parallel": {"full_shard": {"activation_checkpointing": {"interval": 2}}}},
            ActivationCheckpointing(2),
        ),
    ],
)
def test_where_a_strategy_says_what_is_recomputed_auto_leaves_it(monkeypatch, changes, remat):
    config, step = emulated(monkeypatch, **changes)
    assert step.strategy.remat == remat
    assert remat_line(config, step) is None
