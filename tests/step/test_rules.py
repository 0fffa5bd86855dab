"""The table of what `build_train_step` refuses, and that nothing is refused later."""

import contextlib
import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist import MixedPrecision, World, build_train_step, muon
from axon_dist.core.errors import AxonDistError, DivisibilityError, UnsupportedError
from axon_dist.core.weighted import Weighted
from axon_dist.models import ExpertConfig, Transformer, TransformerConfig, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import (
    Reduction,
    Strategy,
    compose,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    local_sgd,
    pipelined,
    tensor_parallel,
    zero,
)
from axon_dist.sharding import LargestDim
from axon_dist.step import rules
from axon_dist.step.guards import DeadlockGuard


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


class Turned(nnx.Module):
    def __init__(self):
        self.turn = nnx.Param(jnp.ones(8, jnp.complex64))

    def __call__(self, x):
        return jnp.abs(x * self.turn[...])


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
    world = dataclasses.replace(World.emulate(8, "dp=8"))
    object.__setattr__(world, "backend", "abacus")  # one that no member of Backend is yet
    return world


def wide():
    return Net(width=64)


def over_nodes():
    return Strategy("mine", opt_state=LargestDim(("nodes",), min_elements=1))


def mixture():
    config = TransformerConfig(
        vocab_size=16, num_layers=2, width=8, num_heads=2, max_length=8,
        experts=ExpertConfig(count=8, per_token=2),
    )  # fmt: skip
    return Transformer(config, rngs=nnx.Rngs(0))


def stacked():
    sizes = {"vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 2, "ffn_width": 16}
    config = TransformerConfig(**sizes, max_length=16, scan_layers=True)
    return Transformer(config, rngs=nnx.Rngs(0))


def lone():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def half_a_mixture():
    model = mixture()
    model.blocks[0].mlp = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return model


def raising():
    return optax.GradientTransformation(lambda params: params["nothing"], lambda *a: a)


WIDE = (pipelined(2, 4), ddp())
PP = "pp=2,dp=4"

# name of the rule -> an example that breaks it, and a part of what is said
EXAMPLES = {
    "options have possible values": (lambda: build(ddp(), accumulate=0), "accumulate is 0"),
    "the axes of the batch exist": (lambda: build(ddp("fsdp")), "'fsdp', which mesh dp=8 lacks"),
    "the axes of the layers exist": (
        lambda: build(tensor_parallel({"0": "column"})),
        "layers over axis 'tp'",
    ),
    "the axes of the arrays exist": (
        lambda: build(Strategy("mine", params=LargestDim(("rows",)))),
        "arrays over axis 'rows'",
    ),
    "elastic steps use only supported options": (
        lambda: build(ddp(), deterministic="elastic", logical_shards=4),
        "is not possible here: logical_shards=4 do not divide over 8 ranks",
    ),
    "elastic updates work element by element": (
        lambda: build(
            ddp(),
            optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            deterministic="elastic",
            logical_shards=8,
        ),
        "is not possible here: the optimizer does not work element by element",
    ),
    "buckets hold whole gradients": (
        lambda: build(zero(1, reduction=Reduction(bucket_capacity=9))),
        "bucket_capacity=9 asks for buckets, which join",
    ),
    "there is host memory to offload to": (
        lambda: build(fsdp(axes="dp", cpu_offload="full"), world=without_host_memory()),
        "needs memory of kind 'pinned_host'",
    ),
    "no array is split over the axis between replicas": (
        lambda: build(compose(ddp(), local_sgd(every=2), over_nodes()), "nodes=2,dp=4"),
        "splits arrays over it",
    ),
    "replicas are not cut into stages": (
        lambda: build(compose(local_sgd(every=2), pipelined(2, 4)), "nodes=2,pp=4"),
        "replicas over axis 'nodes', and cuts each into stages",
    ),
    "replicas stay in device memory": (
        lambda: build(
            compose(local_sgd(every=2), fsdp(axes="dp", cpu_offload="full")), "nodes=2,dp=4"
        ),
        "cpu_offload='full'",
    ),
    "replicas average statistics over their own ranks": (
        lambda: build(compose(local_sgd(every=2), ddp(broadcast_buffers=False)), "nodes=2,dp=4"),
        "one set of statistics.*broadcast_buffers=False",
    ),
    "replicas have no split experts": (
        lambda: build(compose(local_sgd(every=2), expert_parallel()), "nodes=2,ep=4"),
        "experts split over axis 'ep'",
    ),
    "the axis of the stages exists": (
        lambda: build(pipelined(2, 4, axis="qq"), PP),
        "split over axis 'qq', which mesh .* lacks",
    ),
    "the pipeline fits its axis": (lambda: build(pipelined(4, 4), PP), "4 devices.* 2 along"),
    "stages recompute block by block": (
        lambda: build(compose(*WIDE, remat(interval=2)), PP),
        "interval 2; leave",
    ),
    "stages use no rings": (
        lambda: build(compose(pipelined(2, 4), context_parallel()), "pp=2,cp=4"),
        r"ring of axis 'cp'",
    ),
    "rings have no fp8 products": (
        lambda: build(
            tensor_parallel({"up$": "column"}, sequence=True, rings=True), "tp=8", precision="fp8"
        ),
        "products in fp8 have one scale for all of them; leave rings out",
    ),
    "stages see every sample": (
        lambda: build(compose(pipelined(2, 4), ddp("pp")), PP),
        "batch over 'pp'",
    ),
    "a vocabulary is split over the stages only": (
        lambda: build(pipelined(2, 4, split_vocabulary=True), "pp=2,tp=4"),
        "leaves axis 'tp' to the compiler",
    ),
    "stages keep the statistics of all ranks": (
        lambda: build(compose(pipelined(2, 4), ddp(broadcast_buffers=False)), PP),
        "broadcast_buffers=False, but a stage keeps the statistics of the samples of all",
    ),
    "a pipeline reduces once": (
        lambda: build(compose(pipelined(2, 4), ddp(bucket_capacity=9)), PP),
        "a pipeline got bucket_capacity=9; it reduces",
    ),
    "the pipeline sets the number of microbatches": (
        lambda: build(compose(*WIDE), PP, accumulate=2),
        "accumulate=2, but the pipeline runs 4",
    ),
    "there are blocks to unroll": (
        lambda: build(ddp(), unroll=2),
        "unroll=2 .*'ddp' neither splits nor recomputes blocks.*; leave unroll out",
    ),
    "stages have experts in equal blocks": (
        lambda: build(
            compose(pipelined(2, 4), expert_parallel()),
            *("pp=2,ep=4", half_a_mixture),
            loss_fn=next_token_loss,
        ),
        "'blocks/1/mlp/down' in blocks that differ.* along 'ep' .*by ddp or fsdp in addition",
    ),
    "the compiler reduces the gradients of experts": (
        lambda: build(
            compose(expert_parallel(), Strategy("once", reduction=Reduction(per="step"))),
            *("ep=8", mixture),
            loss_fn=next_token_loss,
            accumulate=2,
        ),
        "samples of all its ranks are sent to them",
    ),
    "no replica waits for another": (
        lambda: build(local_sgd(every=2), "nodes=8", nonfinite="stop"),
        "nonfinite='stop' freezes the state of all ranks",
    ),
    "EMA needs one set of parameters": (
        lambda: build(local_sgd(every=2), "nodes=8", ema=0.9),
        "ema=0.9 averages the parameters of every step",
    ),
    "every fragment has parameters": (
        lambda: build(local_sgd(every=20, fragments=20), "nodes=8"),
        "fragments=20, but the model's 8 parameters",
    ),
    "compressed parameters are real": (
        lambda: build(local_sgd(every=2, compress="int8"), "nodes=8", lambda: Net(Turned)),
        "'extra/turn' is complex",
    ),
    "remat policy 'sums' needs sums to keep": (
        lambda: build(compose(ddp(), remat(policy="sums"))),
        "has none",
    ),
    "layers can be changed": (
        lambda: build(tensor_parallel({"up$": "column"}), "tp=8"),
        "matches no layer",
    ),
    "the model's call takes what evaluations give it": (
        lambda: build(ddp(), eval_kwargs={"deterministik": True}),
        "eval_kwargs has 'deterministik', but the call of Net takes",
    ),
    "stages recompute their blocks": (
        lambda: build(compose(*WIDE, remat(classes=("Net",))), PP),
        "here Linear, but activation checkpointing names the classes Net",
    ),
    "fp8 gather needs weights sharded per block": (
        lambda: build(
            ddp(), model=lambda: Net(width=16), precision=MixedPrecision.fp8(gather="fp8")
        ),
        "'ddp' no kernel of a layer in fp8 is split over ranks that have other samples; leave",
    ),
    "statistics can be averaged over ranks": (
        lambda: build(ddp(bucket_capacity=9), model=lambda: Net(Seen)),
        "extra/mean holds batch statistics.*bucket_capacity=9 would need.* leave that out",
    ),
    "matrices can be distributed": (
        lambda: build(ddp(), optimizer=optax.apply_if_finite(muon(0.02), 3)),
        "orthogonalises matrices within 'cond'",
    ),
}


# What cannot be made has its sentence where it is made.
MADE = {
    "the compiler takes its options": (
        lambda: build(ddp(), compiler_options={"xla_bogus": True}),
        "No such compile option: 'xla_bogus'",
    ),
    "the optimizer takes the parameters": (
        lambda: build(ddp(), optimizer=raising()),
        r"cannot work on the parameters of the model: 'nothing' \(KeyError\)",
    ),
    "the optimizer works on stages": (
        lambda: build(pipelined(2, 4), PP, wide, optax.flatten(optax.adam(0.1))),
        "of 'grads/layers/0/",
    ),
    "devices can compute the same bits twice": (
        lambda: build(ddp(), world=of_unknown_kind(), deterministic=True),
        "abacus devices",
    ),
    "the model can be cut into stages": (
        lambda: build(pipelined(8, 8), "pp=8"),
        "8 stages, but the model has 4 blocks",
    ),
    "modules to gather or recompute exist": (
        lambda: build(compose(ddp(), remat(classes=("Blok",)))),
        "'Blok'.* matches no module",
    ),
    "every array can be laid out": (
        lambda: build(tensor_parallel({"layers": "column"}), "tp=8", lambda: Net(width=12)),
        "12 features of dim 1 do not divide over tp=8",
    ),
}


@pytest.mark.parametrize("what", MADE)
def test_stages_and_optimizers_that_cannot_be_built_raise(what):
    run, said = MADE[what]
    with pytest.raises(AxonDistError, match=said):
        run()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: build(compose(*WIDE), PP, unroll=2), "one after another as they are; leave"),
        (
            lambda: build(compose(fsdp(), remat(interval=2)), "fsdp=8", unroll=4),
            "unroll=4 .* recomputes groups of interval=2, which are a loop",
        ),
        *(
            (lambda x=x: build(fsdp(), "fsdp=8", unroll=x), f"unroll( is |=){x!r}")
            for x in (0, True)
        ),
        (
            lambda: build(compose(*WIDE), PP, scan_layers=True),
            "scan_layers=True .*one after another as they are; leave scan_layers out",
        ),
        (
            lambda: build(compose(fsdp(), remat(interval=2)), "fsdp=8", scan_layers=False),
            "scan_layers=False .* recomputes groups of interval=2, which are a loop",
        ),
        (
            lambda: build(fsdp(), "fsdp=8", stacked, scan_layers=False),
            "scan_layers=False .*the model keeps the blocks of 'blocks' stacked, and loops",
        ),
        (
            lambda: build(
                ddp(), model=lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), scan_layers=True
            ),
            "scan_layers=True .*the model repeats no blocks",
        ),
        (
            lambda: build(fsdp(), "fsdp=8", unroll=2, scan_layers=True),
            "unroll is 2, and scan_layers is True: .*leave one of the two out",
        ),
        (lambda: build(fsdp(), "fsdp=8", scan_layers="yes"), "scan_layers.*'yes'"),
    ],
)
def test_blocks_that_cannot_be_unrolled_raise(run, said):
    with pytest.raises(AxonDistError, match=said):
        run()


TABLES = (
    "RULES",
    "PIPELINE_RULES",
    "REPLICA_RULES",
    "PLAN_RULES",
    "PIPELINE_PLAN_RULES",
    "REPLICA_PLAN_RULES",
)
NAMES = list(dict.fromkeys(rule.name for table in TABLES for rule in getattr(rules, table)))


@pytest.mark.parametrize("rule", NAMES)
def test_every_rule_is_broken_by_its_example(rule):
    run, said = EXAMPLES[rule]
    with pytest.raises(AxonDistError, match=said) as caught:
        run()
    assert caught.value.code


def test_names_are_those_of_the_rules():
    assert sorted(EXAMPLES) == sorted(NAMES)
    for table in TABLES:
        names = [rule.name for rule in getattr(rules, table)]
        assert len(names) == len(set(names))


# A rule of each table; the examples of all are refused above.
@pytest.mark.sample(
    "the axes of the batch exist",
    "a pipeline reduces once",
    "replicas are not cut into stages",
    "there are blocks to unroll",
    "stages recompute their blocks",
    "every fragment has parameters",
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_else_says_what_a_rule_says(name, monkeypatch):
    for table in TABLES:
        kept = tuple(rule for rule in getattr(rules, table) if rule.name != name)
        monkeypatch.setattr(rules, table, kept)
    run, said = EXAMPLES[name]
    heard = ""
    try:
        run()
    except AxonDistError as error:
        heard = str(error)
    except Exception:  # what lies deeper may say anything, or nothing at all
        pass
    assert not re.search(said, heard)


# What only a batch can show


class Mixed(nnx.Module):
    """Blocks with what strategies stumble over."""

    def __init__(self, dropout=False, statistics=False):
        rngs = nnx.Rngs(0)
        norm = nnx.BatchNorm if statistics else nnx.LayerNorm
        self.norm = norm(8, rngs=rngs)
        self.blocks = nnx.List([MixedBlock(dropout, rngs) for _ in range(4)])

    def __call__(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


class MixedBlock(nnx.Module):
    def __init__(self, dropout, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, x):
        y = self.down(nnx.relu(self.up(x)))
        return x + (y if self.drop is None else self.drop(y))


def weighted(model, batch):
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return Weighted(jnp.sum(errors * batch["w"]), jnp.sum(batch["w"]))


MESHES = ("dp=8", "dp=2,fsdp=4", "dp=4,tp=2", "pp=2,dp=4", "pp=2,dp=2,tp=2", "dp=4,cp=2")
DATA = (
    ddp("dp"),
    ddp("dp", bucket_capacity=100),
    ddp("dp", sync="overlapped"),
    ddp("dp", broadcast_buffers=False),
    ddp("dp", reduce_dtype="bfloat16"),
    zero(1, "dp", min_elements=8),
    zero(2, "dp", min_elements=8),
    zero(3, "dp", min_elements=8),
    zero(3, "dp", min_elements=8, reduction=Reduction(manual=True)),
    fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8),
)
OPTIMIZERS = (optax.sgd(0.1), optax.adam(1e-3), optax.lamb(1e-3), optax.adafactor(1e-3))


def composition(seed):
    """A strategy, a mesh and options, as a user may put them together without much thought."""
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    parts = [draw.choice(DATA)]
    if "pp" in mesh:
        backward = draw.choice(["recompute", "residuals", "dots"])
        schedule = draw.choice(["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble_h1"])
        parts.append(pipelined(2, 4, schedule, backward=backward))
    if "tp" in mesh:
        plan = {"up$": "column", "down$": "row"}
        parts.append(tensor_parallel(plan, sequence=draw.random() < 0.3))
    if draw.random() < 0.3:
        parts.append(remat(interval=draw.choice([1, "sqrt"])))
    pad = draw.choice([None, None, "w"])
    options = {
        "accumulate": draw.choice([1, 1, 2]),
        "clip_norm": draw.choice([None, 1.0]),
        "precision": draw.choice([None, "bf16", "fp16"]),
        "nonfinite": draw.choice([None, "skip", "stop"]),
        "pad": pad,
        "model": draw.choice([Mixed, lambda: Mixed(dropout=True), lambda: Mixed(statistics=True)]),
        "optimizer": draw.choice(OPTIMIZERS),
        "loss_fn": weighted if pad else draw.choice([weighted, loss]),
    }
    rows = draw.choice([32, 32, 32, 12])
    batch = batch_of(rows) | {"w": jax.ShapeDtypeStruct((rows,), jnp.float32)}
    return parts, mesh, options, batch


@pytest.mark.sample("1", "9", "21", "33")
@pytest.mark.parametrize("seed", range(40))
def test_a_step_built_for_a_batch_can_be_lowered_for_it(seed):
    parts, mesh, options, batch = composition(seed)
    try:
        step = build(compose(*parts), mesh, batch=batch, **options)
    except AxonDistError:
        return
    step.lower(batch)


@pytest.mark.full
def test_most_compositions_are_not_refused():
    """Else the test above would hold of a builder that refuses everything."""
    outcomes = []
    for seed in range(12):
        parts, mesh, options, _ = composition(seed)
        with contextlib.suppress(AxonDistError):
            build(compose(*parts), mesh, **options)
            outcomes.append(seed)
    assert len(outcomes) >= 5


def test_a_batch_has_the_step_refused_at_build():
    class Stops(Mixed):
        def __call__(self, x):
            for block in self.blocks[:-1]:
                x = block(x)
            return x

    step = build(pipelined(2, 4), PP, model=Stops)
    with pytest.raises(UnsupportedError, match=r"no call of 1 .*'blocks/3'"):
        step.check(batch_of())
    with pytest.raises(UnsupportedError, match=r"no call of 1 .*'blocks/3'"):
        build(pipelined(2, 4), PP, batch=batch_of(), model=Stops)
    with pytest.raises(DivisibilityError, match=r"12 samples does not divide over dp=8"):
        build(ddp(), batch=batch_of(12))


def test_checked_batches_are_not_traced_again(world):
    traces = []

    def counted(model, batch):
        traces.append(1)
        return loss(model, batch)

    batch = {name: np.ones((16, 8), np.float32) for name in "xy"}
    step = build(ddp(), loss_fn=counted, batch=batch)
    seen = len(traces)
    assert seen
    step(step.init(), batch)
    step.check(batch, own_rows=True)
    assert len(traces) == seen


def test_attention_that_asks_for_more_than_strategies_give():
    class Masked(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def attend(self, query, key, value, mask):
            return value

        def __call__(self, x):
            heads = self.linear(x)[:, :, None]
            return self.attend(heads, heads, heads, None)[:, :, 0]

    with pytest.raises(UnsupportedError, match=r"Masked.attend needs mask beside"):
        build(context_parallel(), "dp=4,cp=2", Masked)

    class Optional(Masked):
        def attend(self, query, key, value, mask=None):
            return nnx.dot_product_attention(query, key, value)

        def __call__(self, x):
            heads = self.linear(x)[:, :, None]
            mixed = self.attend(value=heads, key=heads, query=heads)
            return self.attend(mixed, heads, heads, jnp.ones(()))[:, :, 0]

    sequences = {name: jax.ShapeDtypeStruct((8, 4, 8), jnp.float32) for name in "xy"}
    with pytest.raises(UnsupportedError, match=r"Optional.attend is called with .*, mask; if"):
        build(context_parallel(), "dp=4,cp=2", Optional, batch=sequences)


def test_a_permutation_that_a_stage_asks_for_is_seen_before_compiling(world):
    turn = lambda x: jax.lax.ppermute(x, "dp", [(0, 1), (1, 0)])
    stages = lambda i, x: jax.lax.cond(i > 0, turn, lambda x: x, x)
    run = jax.shard_map(
        stages, mesh=world.mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check_vma=False
    )
    guarded = DeadlockGuard(run)
    with pytest.raises(UnsupportedError, match=r"ppermute over .*dp.*forever|forever: ppermute"):
        guarded.lower(jnp.int32(1), jnp.ones(8))
    outside = jax.shard_map(turn, mesh=world.mesh, in_specs=P("dp"), out_specs=P("dp"))
    assert DeadlockGuard(outside).lower(jnp.ones(8))
