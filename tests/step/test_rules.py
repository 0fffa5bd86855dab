"""The table of what `build_train_step` refuses, and that nothing is refused later."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step
from axon_dist.core.errors import AxonDistError
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import (
    Reduction,
    Strategy,
    compose,
    context_parallel,
    ddp,
    fsdp,
    pipelined,
    tensor_parallel,
    zero,
)
from axon_dist.sharding import LargestDim
from axon_dist.step import RULES


class Net(nnx.Module):
    """Blocks in a list, in front of what an example adds."""

    def __init__(self, extra=None, width=8):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(4)])
        self.extra = extra() if extra is not None else None

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x if self.extra is None else self.extra(x)


class Seen(nnx.Module):
    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x):
        self.mean[...] = x.mean(0)
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(rows=16):
    return {name: jax.ShapeDtypeStruct((rows, 8), jnp.float32) for name in "xy"}


def build(strategy, mesh="dp=8", model=Net, optimizer=None, loss_fn=loss, world=None, **options):
    world = World.emulate(8, mesh) if world is None else world
    return build_train_step(model, optimizer or optax.sgd(0.1), loss_fn, strategy, world, **options)


def remat(**options):
    return Strategy("remat", remat=ActivationCheckpointing(**options))


class WithoutHostMemory(World):
    def memory_kinds(self):
        return frozenset({"device"})


def without_host_memory():
    world = World.emulate(8, "dp=8")
    fields = {field.name: getattr(world, field.name) for field in dataclasses.fields(World)}
    return WithoutHostMemory(**fields)


def of_unknown_kind():
    return dataclasses.replace(World.emulate(8, "dp=8"), backend="abacus")


def headed():
    return Net(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(1)))


def raising():
    return optax.GradientTransformation(lambda params: params["nothing"], lambda *a: a)


WIDE = (pipelined(2, 4), ddp())
PP = "pp=2,dp=4"

# name of the rule -> an example that breaks it, and a part of what is said
EXAMPLES = {
    "options have possible values": (lambda: build(ddp(), accumulate=0), "accumulate is 0"),
    "devices can compute the same bits twice": (
        lambda: build(ddp(), world=of_unknown_kind(), deterministic=True),
        "abacus devices",
    ),
    "the compiler takes its options": (
        lambda: build(ddp(), compiler_options={"xla_bogus": True}),
        "No such compile option: 'xla_bogus'",
    ),
    "the axes of the batch exist": (lambda: build(ddp("fsdp")), "'fsdp', which mesh dp=8 lacks"),
    "the axes of the layers exist": (
        lambda: build(tensor_parallel({"0": "column"})),
        "layers over axis 'tp'",
    ),
    "the axes of the arrays exist": (
        lambda: build(Strategy("mine", params=LargestDim(("rows",)))),
        "arrays over axis 'rows'",
    ),
    "buckets are of whole gradients": (
        lambda: build(zero(1, reduction=Reduction(bucket_capacity=9))),
        "bucket_capacity=9 joins",
    ),
    "there is host memory to offload to": (
        lambda: build(fsdp(axes="dp", cpu_offload="full"), world=without_host_memory()),
        "needs memory of kind 'pinned_host'",
    ),
    "the pipeline fits its axis": (lambda: build(pipelined(4, 4), PP), "4 devices.* 2 along"),
    "stages recompute block by block": (
        lambda: build(compose(*WIDE, remat(interval=2)), PP),
        "interval 2; leave",
    ),
    "stages send nothing around": (
        lambda: build(compose(pipelined(2, 4), context_parallel()), "pp=2,cp=4"),
        r"ring of axis 'cp'",
    ),
    "stages see every sample": (
        lambda: build(compose(pipelined(2, 4), ddp("pp")), PP),
        "batch over 'pp'",
    ),
    "stages keep no statistics": (
        lambda: build(compose(pipelined(2, 4), ddp(broadcast_buffers=False)), PP),
        "broadcast_buffers=False",
    ),
    "a pipeline reduces once": (
        lambda: build(compose(pipelined(2, 4), ddp(bucket_capacity=9)), PP),
        "bucket_capacity=9 and sync=SYNCHRONOUS",
    ),
    "microbatches are the pipeline's": (
        lambda: build(compose(*WIDE), PP, accumulate=2),
        "accumulate=2, and the pipeline runs 4",
    ),
    "there are sums to keep": (lambda: build(compose(ddp(), remat(policy="sums"))), "has none"),
    "layers can be changed": (
        lambda: build(tensor_parallel({"up$": "column"}), "tp=8"),
        "matches no layer",
    ),
    "the model can be cut into stages": (
        lambda: build(pipelined(8, 8), "pp=8"),
        "8 stages, and the model has 4 blocks",
    ),
    "stages recompute their blocks": (
        lambda: build(compose(*WIDE, remat(classes=("Net",))), PP),
        "here Linear, and activation checkpointing names the classes Net",
    ),
    "modules to gather or recompute exist": (
        lambda: build(compose(ddp(), remat(classes=("Blok",)))),
        "'Blok'.* matches no module",
    ),
    "statistics are of the whole batch": (
        lambda: build(ddp(), model=lambda: Net(Seen), accumulate=2),
        "extra/mean holds batch statistics",
    ),
    "the optimizer takes the parameters": (
        lambda: build(ddp(), optimizer=raising()),
        r"cannot work on the parameters of the model: 'nothing' \(KeyError\)",
    ),
    "the optimizer works on stages": (
        lambda: build(pipelined(2, 4), PP, headed, optax.flatten(optax.adam(0.1))),
        "of 'grads/layers/0/",
    ),
    "every array can be laid out": (
        lambda: build(tensor_parallel({"layers": "column"}), "tp=8", lambda: Net(width=12)),
        "12 features of dim 0 do not divide over tp=8",
    ),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_is_broken_by_its_example(rule):
    run, said = EXAMPLES[rule]
    with pytest.raises(AxonDistError, match=said):
        run()


def test_names_are_those_of_the_rules():
    names = [rule.name for rule in RULES]
    assert sorted(EXAMPLES) == sorted(set(names))
    assert len(names) == len(set(names))


# What cannot be made has its sentence where it is made: the rule has it made early.
MADE = {
    "the optimizer takes the parameters",
    "the optimizer works on stages",
    "devices can compute the same bits twice",
    "the compiler takes its options",
    "the model can be cut into stages",
    "modules to gather or recompute exist",
    "every array can be laid out",
}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in MADE])
def test_nothing_else_says_what_a_rule_says(name, monkeypatch):
    kept = tuple(rule for rule in RULES if rule.name != name)
    monkeypatch.setattr("axon_dist.step.rules.RULES", kept)
    run, said = EXAMPLES[name]
    heard = ""
    try:
        run()
    except AxonDistError as error:
        heard = str(error)
    except Exception:  # what lies deeper may say anything, or nothing at all
        pass
    assert not re.search(said, heard)
