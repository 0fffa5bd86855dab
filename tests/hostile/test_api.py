"""Invalid arguments of public calls: each raises an error of the library, with a sentence.

Every row is refused before anything is compiled. The default run tries what people mistake most:
an axis, a batch, a loss or an optimizer of the wrong kind; `-m full` tries the other rows, and
`tests/fuzz/test_inputs.py` random ones.
"""

import functools
import importlib
import inspect
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axon_dist
from axon_dist import World
from axon_dist.collectives import Quantized, TopK, plan_buckets
from axon_dist.core.errors import AxonDistError
from axon_dist.mesh import MeshSpec
from axon_dist.ops.fp8 import size_of
from axon_dist.schedule import (
    Costs,
    build_schedule,
    draw,
    min_microbatches,
    order_to_table,
    partition,
    search,
    simulate,
    stage_ranges,
    validate,
)
from axon_dist.sharding import Replicate
from axon_dist.step import TrainState
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import LoopOptions, Trainer


class Net(nnx.Module):
    def __init__(self, width=8):
        ones = lambda key, shape, dtype, *_: jnp.asarray(np.ones(shape, dtype))
        self.up = nnx.Linear(4, width, kernel_init=ones, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(width, 1, kernel_init=ones, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


WORLD = World.emulate(8)
GROUP = WORLD.group("dp")
NET = Net()
BATCH = {"x": np.ones((16, 4), np.float32), "y": np.ones((16, 1), np.float32)}
ODD = {
    "None": None, "text": "dp", "float": 2.5, "list": [[1]], "class": Net, "thing": object(),
    "NaN": float("nan"), "text of a number": "8", "function": lambda: 3,
}  # fmt: skip


def build(**changes):
    given = {"model": NET, "optimizer": optax.sgd(0.1), "loss_fn": loss}
    given |= {"strategy": axon_dist.ddp(), "world": WORLD}
    return axon_dist.build_train_step(**{**given, **changes})


STACKED = jnp.asarray(np.ones((8, 8), np.float32))
CALLS = {
    "World.emulate": lambda odd: World.emulate(odd),
    "World.emulate axes": lambda odd: World.emulate(8, odd),
    "World.init axes": lambda odd: World.init(odd),
    "World.init devices": lambda odd: World.init("dp=-1", odd),
    "World": lambda odd: World(odd, odd),
    "MeshSpec": lambda odd: axon_dist.MeshSpec(odd),
    "MeshSpec size": lambda odd: axon_dist.MeshSpec(dp=odd),
    "MeshSpec.resolve": lambda odd: axon_dist.MeshSpec("dp=-1").resolve(odd),
    "group": lambda odd: WORLD.group("dp", odd),
    "new_group": lambda odd: WORLD.new_group(odd),
    "new_group rank": lambda odd: WORLD.new_group([odd]),
    "ProcessGroup mesh": lambda odd: axon_dist.ProcessGroup(odd, ("dp",)),
    "ProcessGroup axes": lambda odd: axon_dist.ProcessGroup(WORLD.mesh, odd),
    "group_of": lambda odd: GROUP.group_of(odd),
    "contains": lambda odd: GROUP.contains(odd),
    "share_of_batch": lambda odd: WORLD.share_of_batch(odd),
    "parts_of_batch": lambda odd: WORLD.parts_of_batch(odd),
    "all_reduce_sum group": lambda odd: axon_dist.all_reduce_sum(STACKED, odd),
    "all_gather group": lambda odd: axon_dist.all_gather(STACKED, odd),
    "broadcast group": lambda odd: axon_dist.broadcast(STACKED, odd),
    "broadcast src": lambda odd: axon_dist.broadcast_from(STACKED, GROUP, src=odd),
    "gather dst": lambda odd: axon_dist.gather_tensor(STACKED, GROUP, dst=odd),
    "sync_gradients group": lambda odd: axon_dist.sync_gradients(STACKED, odd),
    "send_recv perm": lambda odd: axon_dist.send_recv(STACKED, GROUP, odd),
    "send_recv pair": lambda odd: axon_dist.send_recv(STACKED, GROUP, [odd]),
    "shift": lambda odd: axon_dist.shift(STACKED, GROUP, odd),
    "barrier": lambda odd: axon_dist.barrier(odd),
    "rank": lambda odd: axon_dist.rank(odd),
    "world_size": lambda odd: axon_dist.world_size(odd),
    "DDP group": lambda odd: axon_dist.DDP(NET, odd),
    "FSDP group": lambda odd: axon_dist.FSDP(NET, odd),
    "ZeROOptimizer": lambda odd: axon_dist.ZeROOptimizer(optax.sgd(0.1), 1, odd),
    "ZeROStage": lambda odd: axon_dist.ZeROStage(odd),
    "CPUOffload": lambda odd: axon_dist.CPUOffload(odd),
    "ShardingStrategy": lambda odd: axon_dist.ShardingStrategy(odd),
    "ParallelMode": lambda odd: axon_dist.ParallelMode(odd),
    "ReduceOp": lambda odd: axon_dist.ReduceOp(odd),
    "tensor_parallel": lambda odd: axon_dist.tensor_parallel(odd),
    "GradScaler": lambda odd: axon_dist.GradScaler(odd),
    "autocast": lambda odd: axon_dist.autocast(NET, odd),
    "lora rank": lambda odd: axon_dist.lora(NET, odd, rngs=nnx.Rngs(0)),
    "SizeBasedAutoWrapPolicy": lambda odd: axon_dist.SizeBasedAutoWrapPolicy(odd),
    "optimizer": lambda odd: build(optimizer=odd),
    "world": lambda odd: build(world=odd),
    "strategy": lambda odd: build(strategy=odd),
    "accumulate": lambda odd: build(accumulate=odd or 0),
    "metrics": lambda odd: build(metrics=odd),
    "load_checkpoint": lambda odd: axon_dist.load_checkpoint(odd, {"w": jnp.ones(2)}),
    "load_weights": lambda odd: axon_dist.load_weights(NET, odd),
    "save_weights model": lambda odd: axon_dist.save_weights(odd, "/none/x.safetensors"),
    "hub_config": lambda odd: axon_dist.hub_config(odd),
    "load_model": lambda odd: axon_dist.load_model(odd),
    "generate": lambda odd: axon_dist.generate(odd, [[1]], 2),
    "num_steps": lambda odd: LoopOptions(num_steps=odd).validate(),
    "schedule": lambda odd: build_schedule(odd, 4, 8),
    "stages": lambda odd: build_schedule("1f1b", odd, 8),
    "Costs": lambda odd: Costs(f=odd),
    "ddp axes": lambda odd: axon_dist.ddp(() if odd is None or isinstance(odd, str) else odd),
    "zero stage": lambda odd: axon_dist.zero(odd),
    "min_elements": lambda odd: axon_dist.fsdp(min_elements=odd),
    "broadcast_buffers": lambda odd: axon_dist.ddp(broadcast_buffers=odd),
    "bucket_capacity": lambda odd: axon_dist.ddp(bucket_capacity=odd or 0),
    "fsdp reduction": lambda odd: axon_dist.fsdp(reduction=odd or 0),
    "num_microbatches": lambda odd: axon_dist.pipelined(2, odd),
    "costs": lambda odd: axon_dist.pipelined(2, 2, costs=odd or (-1.0,)),
    "pipeline schedule": lambda odd: axon_dist.Pipeline(NET, 2, 2, odd),
    "stages of modules": lambda odd: axon_dist.Pipeline.from_modules(odd),
    "stage id": lambda odd: axon_dist.PipelineStage(NET, odd),
    "rings": lambda odd: axon_dist.tensor_parallel({"up": "column"}, rings=odd),
    "context axis of several": lambda odd: axon_dist.context_parallel(axis=("cp", odd)),
    "experts": lambda odd: axon_dist.expert_parallel(experts=odd),
    "expert capacity": lambda odd: axon_dist.expert_parallel(capacity=odd or 0),
    "every": lambda odd: axon_dist.diloco(every=odd),
    "compress": lambda odd: axon_dist.diloco(every=2, compress=odd or np.ones(2)),
    "skip": lambda odd: axon_dist.MixedPrecision(skip=odd),
    "checkpointing policy": lambda odd: axon_dist.ActivationCheckpointing(policy=odd),
    "checkpointing classes": lambda odd: axon_dist.ActivationCheckpointing(classes=odd or 3),
    "Reduction sync_buffers": lambda odd: axon_dist.Reduction(sync_buffers=odd),
    "Strategy params": lambda odd: axon_dist.Strategy("mine", params=odd),
    "Strategy batch_axes": lambda odd: axon_dist.Strategy("mine", batch_axes=odd),
    "Shared": lambda odd: axon_dist.Shared(odd if not isinstance(odd, (float, list)) else None),
    "per_sample": lambda odd: axon_dist.per_sample(odd if not callable(odd) else None),
    "spmd": lambda odd: GROUP.spmd(odd if not callable(odd) else None),
    "sequence_length": lambda odd: LoopOptions(3, sequence_length=odd or -1),
    "best_mode": lambda odd: LoopOptions(3, best_mode=odd),
    "trainable": lambda odd: build(trainable=odd),
    "scaler": lambda odd: build(scaler=odd or 0),
    "ema": lambda odd: build(ema=odd or -1),
    "scale_lr": lambda odd: axon_dist.planner.scale_lr(0.1, odd, 32),
    "Timeouts": lambda odd: axon_dist.mesh.Timeouts(launch=odd),
    "address": lambda odd: axon_dist.mesh.LaunchSpec(coordinator_address=odd),
    "Loader": lambda odd: axon_dist.data.Loader(odd, global_batch=2),
    "windows": lambda odd: axon_dist.models.TransformerConfig(windows=odd).validate(),
    "rope_scaling": lambda odd: axon_dist.models.TransformerConfig(rope_scaling=odd).validate(),
}
"""Calls that none of `ODD` is right for, but these."""
RIGHT = {
    ("World.emulate", "None"),
    ("World.init devices", "None"),
    ("Costs", "float"),
    ("GradScaler", "float"),
    ("expert capacity", "float"),
    ("scale_lr", "float"),
    ("Timeouts", "float"),
    ("address", "None"),
    ("rope_scaling", "None"),
}


NUMBERS = {"w": jnp.asarray(np.ones(8, np.float32))}


def candidates(**given):
    work = axon_dist.planner.Workload(num_params=9, num_layers=1, flops=1.0, global_batch=8)
    known = {"work": work, "num_devices": 4, "hardware": axon_dist.planner.hardware("h100")}
    return list(axon_dist.planner.candidates(**{**known, **given}))


def muon_of(dims):
    optimizer, params = axon_dist.muon(0.1, muon_weight_dimension_numbers=dims), {"w": STACKED}
    optimizer.update(params, optimizer.init(params), params)


def error_of(call):
    try:
        call()
    except AxonDistError as error:
        return str(error)
    return "it was taken"


@pytest.mark.sample("MeshSpec size", "strategy")
@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments_raise_clear_errors(call):
    odd = {name: value for name, value in ODD.items() if (call, name) not in RIGHT}
    told = {name: error_of(lambda value=value: CALLS[call](value)) for name, value in odd.items()}
    assert [row for row in told.items() if not 15 < len(row[1]) < 1500] == []


def public_names():
    names = pathlib.Path(__file__).parents[1] / "repo" / "public_names.txt"
    for subpackage, name in map(str.split, names.read_text().splitlines()):
        yield subpackage, name, getattr(importlib.import_module(subpackage), name)


def test_every_public_function_and_class_pickles():
    lost = []
    for subpackage, name, thing in public_names():
        if inspect.isfunction(thing) or inspect.isclass(thing):
            try:
                same = pickle.loads(pickle.dumps(thing)) is thing
            except Exception as error:
                same, name = False, f"{name}: {error}"
            lost += [] if same else [f"{subpackage} {name}"]
    assert lost == []


def test_a_public_name_is_the_function_itself():
    from axon_dist.step.step import build_train_step

    assert axon_dist.build_train_step is axon_dist.step.build_train_step is build_train_step


def test_an_error_of_python_stays_as_it_is():
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        axon_dist.ddp(speed=3)
    with pytest.raises(IndexError, match="tuple index out of range"):
        build_schedule("1f1b", 4, 8).order(10**12)


TABLE = build_schedule("gpipe", 2, 2)
COMMON = [
    (lambda: World.emulate("8"), "cannot emulate '8' devices; ask for a whole number"),
    (lambda: axon_dist.DDP(NET, "dp"), "DDP got group='dp', a str; give a ProcessGroup"),
    (lambda: build(optimizer=optax.sgd), "optimizer is a function"),
    (lambda: build(loss_fn=lambda model: 0.0), r"loss_fn takes \(model\), but is called as"),
    (lambda: build(loss_fn=lambda m, b: m(b["x"]), batch=BATCH), "loss"),
    (lambda: World.emulate(8, "data=4,model=2"), "unknown mesh axis 'data'. Did you mean 'dp'"),
    (lambda: build(batch={"x": BATCH["x"]}), "looks up 'y', but the batch has x: float32"),
]
"""Mistakes that people make."""
OTHERS = [
    (
        lambda: axon_dist.PipelineSchedule("2f2b"),
        "PipelineSchedule got '2f2b', and has no",
    ),
    (lambda: build(optimizer=nnx.Optimizer(NET, optax.sgd(0.1), wrt=nnx.Param)), "is an nnx.O"),
    (lambda: LoopOptions(num_steps=2.5), "got num_steps=2.5, a float; give a whole number"),
    (lambda: World.emulate(0), "cannot emulate 0 devices; ask for a whole number from 1"),
    (lambda: World.emulate(-1), "cannot emulate -1 devices"),
    (lambda: World.emulate(True), "cannot emulate True devices; ask"),
    (lambda: World.emulate(10**12), "cannot emulate 1000000000000 devices.* from 1 to 1024"),
    (lambda: WORLD.new_group([0, 0]), "name a rank twice"),
    (lambda: WORLD.new_group([8]), r"ranks \[8\] do not exist in a world of 8"),
    (lambda: axon_dist.DDP(3, GROUP), "DDP got module=3, an int; give an nnx.Module"),
    (lambda: axon_dist.DDP(axon_dist.DDP(NET, GROUP), GROUP), "module=a DistributedDataPara"),
    (lambda: axon_dist.FSDP(axon_dist.FSDP(NET, GROUP), GROUP), "not a wrapper of one"),
    (lambda: build(metrics="loss"), "got metrics='loss', a str; give a list of strings"),
    (lambda: build(optimizer=optax.GradientTransformation), "optimizer is the class Gradient"),
    (lambda: build(loss_fn=lambda a, b, c: 0.0), "missing a required argument: 'c'"),
    (lambda: build(loss_fn=Net), "loss_fn is the class Net; give a function"),
    (lambda: build(loss_fn=lambda m, b: (0.0, 1.0, 2.0), batch=BATCH), "loss"),
    (lambda: build(loss_fn=lambda m, b: None, batch=BATCH), "loss"),
    (
        lambda: axon_dist.all_reduce_sum(np.full(8, 2**40), GROUP),
        "has the number 1099511",
    ),
    (lambda: axon_dist.all_reduce_sum(["a"] * 8, GROUP), "got 'a', a str; give arrays of num"),
    (lambda: axon_dist.all_reduce_sum(None, GROUP), "a collective got None"),
    (
        lambda: axon_dist.save_checkpoint("a\0b", {"w": jnp.ones(2)}),
        "other control character",
    ),
    (lambda: axon_dist.save_checkpoint(3, {"w": jnp.ones(2)}), "the checkpoint: got 3, a int"),
    (lambda: axon_dist.load_checkpoint("~nosuchuser/x", {}), "there is no user 'nosuchuser'"),
    (
        lambda: axon_dist.load_checkpoint("/dev/zero", {"w": jnp.ones(2)}),
        "is a device",
    ),
    (lambda: axon_dist.load_weights(NET, []), r"got \[\] as the files of weights"),
    (lambda: axon_dist.load_weights(NET, "/dev/zero"), "zero"),
    (lambda: build_schedule("1f1b", 10**12, 8), "a table of 8000000000000 forwards"),
    (lambda: Costs(f=1e308), "Times add up"),
    (lambda: axon_dist.ddp(()), "a strategy got no axes; name at least one axis"),
    (lambda: build(strategy=axon_dist.ddp("data")), "'data', which mesh dp=8 lacks. Did you m"),
    (lambda: axon_dist.ProcessGroup.mock(8), "World.emulate.8..default_group"),
    (lambda: GROUP.rank(), r"axon_dist.rank\(group\) in group.spmd"),
    (lambda: GROUP.partitions, "no 'partitions'; Did you mean 'partition'"),
    (lambda: axon_dist.FSDP(NET, GROUP).memory_stats({}), "give all or none"),
    (lambda: build(trainable=lambda: True), r"a predicate \(keys, variable\)"),
    (lambda: axon_dist.pipelined(2, 2, costs=(1.0, np.nan)), "each item is a positive number"),
    (lambda: axon_dist.Pipeline(None, 2), "Pipeline got module=None; give an nnx.Module"),
    (lambda: LoopOptions(-1), "got num_steps=-1"),
    (lambda: axon_dist.Shared(None), "Shared got value=None; give an array or a number"),
    (lambda: axon_dist.FSDP(lambda: 3, GROUP).parameters(), "FSDP got module=3, an int"),
    (lambda: build(loss_fn=functools.cache(loss)), "give the function itself, loss_fn.__wra"),
    (lambda: build(model=functools.cache(Net)), "makes the model is cached by functools"),
    (lambda: axon_dist.muon(None), "muon got learning_rate=None; give a number, or"),
    (lambda: axon_dist.muon(0.1, mu_dtype="x"), "mu_dtype='x', a str; give a dtype, such as"),
    (lambda: axon_dist.muon(0.1, ns_steps=-1), "a whole number, at least 0"),
    (lambda: World.init("dp=-1", jnp.ones(3)), "a ArrayImpl, among the devices; give devices"),
    (lambda: axon_dist.muon(0.1, ns_steps=10**12), "at least 0 and at most 1000"),
    (lambda: axon_dist.suggest_plan(int), r"suggest_plan got model\(\)=0, an int; give an nnx"),
    (lambda: axon_dist.hidden_matrices(int), r"hidden_matrices got model\(\)=0, an int"),
    (
        lambda: axon_dist.mesh.build_mesh(axon_dist.MeshSpec("dp=2"), []),
        "resolve got num_devices=0, an int; give a whole number, at least 1",
    ),
    (
        lambda: axon_dist.sharding.shardings(Replicate(), NUMBERS, WORLD.mesh, "attic"),
        "cannot hold an array as .* in memory_kind='attic': .*leave memory_kind out",
    ),
    (lambda: axon_dist.checkpoint.Manifest.from_json(""), "manifest.json was not written by a"),
    (lambda: muon_of(True), "has True for an array of shape .8, 8.; give an optax.contrib.Muo"),
    (lambda: axon_dist.precision.cast_floating(NUMBERS, "x"), "cast_floating got dtype='x'"),
    (lambda: candidates(num_devices=10**40), "an int; give a number, 1 to 10"),
    (lambda: candidates(work=None), "candidates got work=None; give a Workload"),
    (
        lambda: axon_dist.planner.idle_share("gpipe", None, 4),
        "got num_devices=None. It must be",
    ),
    (lambda: axon_dist.reduce_scatter_sum(STACKED, GROUP, pad="x"), "give True or False"),
    (lambda: World(WORLD.mesh, "x"), "Valid: emulated, gloo, nccl, tpu"),
    (lambda: axon_dist.load_weights(NET, "w", cast="x"), "cast='x', a str; give True or False"),
    (lambda: axon_dist.GradScaler().load_state_dict({}), "lacks good_steps, scale; give a"),
    (lambda: axon_dist.MeshSpec(dp="x" * 5000), r"has size '[^']{79}; it must be a positive"),
    (lambda: axon_dist.zero("x" * 5000), r"ZeRO stage '[^']{79}; it must be a number from 0"),
    (lambda: axon_dist.zero(1, "dp", shard_axes="x" * 5000), r"axes \('[^']{198} must be one or"),
    (lambda: axon_dist.tensor_parallel("x" * 5000), r"no plan is called '[^']{79}\."),
    (lambda: axon_dist.compose("x" * 5000), r"got '[^']{79} for a strategy; give one"),
    (lambda: axon_dist.context_parallel(np.arange(3)), "ContextMode got array.*no such member"),
    (lambda: axon_dist.pipelined(2, 2, boundaries=range(10**12)), "each item is a whole number"),
    (lambda: axon_dist.pipelined(2, 2, boundaries=range(10**30)), "each item is a whole number"),
    (lambda: axon_dist.GradScaler(10**400), "got init_scale"),
    (lambda: Quantized({"int8"}), r"unknown kind \{'int8'\}.*Valid: fp8, int8"),
    (lambda: TopK(10**400), "share is 10000.*give the fraction of numbers"),
    (lambda: axon_dist.mesh.Timeouts(10**400), "must be more than 0 seconds"),
    (lambda: axon_dist.mesh.parse_target(8), "parse_target got name=8, an int; give a string"),
    (lambda: axon_dist.planner.hardware(["h100"]), "got name=.*a list; give a string"),
    (lambda: axon_dist.planner.parse_cluster(8), "got text=8, an int; give a string"),
    (lambda: axon_dist.planner.parse_memory(80), "got text=80, an int; give a string"),
    (lambda: axon_dist.planner.parse_bytes("x" * 5000), r"read '[^']{79} as a size in bytes"),
    (lambda: axon_dist.planner.scale_lr(10**400, 2, 1), "a number above 0, which a float can"),
    (lambda: axon_dist.planner.scale_lr(1, 10**400, 1), r"at least 1 and at most 10\^18"),
    (lambda: axon_dist.planner.Candidate(strategy=3), "got strategy=3, an int; give a string"),
    (lambda: axon_dist.planner.candidate_for(None, 2), "got strategy=None; give a string"),
    (
        lambda: axon_dist.planner.Workload(
            num_params="7B", num_layers=1, flops=1.0, global_batch=8
        ),
        "got num_params='7B', a str; give a finite number",
    ),
    (
        lambda: axon_dist.planner.idle_share("1f1b", 2, 4, recomputed="all"),
        "got recomputed='all', a str; give a whole number, at least 0",
    ),
    (lambda: axon_dist.planner.idle_share(["1f1b"], 2, 4), "PipelineSchedule got .'1f1b'."),
    (lambda: Costs(f=10**400), "got the cost f=1000.*a finite number"),
    (lambda: Costs(stage_weights=("a",)), r"stage_weights=\('a',\). Each must be a finite number"),
    (lambda: search(2, 2, costs=3), "got the costs 3. Give Costs, such as Costs"),
    (lambda: validate(TABLE, max_live="4"), "got '4' for max_live for 2 devices. Give one number"),
    (lambda: simulate(TABLE, lockstep="no"), "got lockstep='no', a str; give True or False"),
    (lambda: draw(TABLE, color="no"), "got color='no', a str; give True or False"),
    (lambda: draw(TABLE, width="80"), "got width='80'. A drawing needs a whole number of at"),
    (lambda: partition(4, 2, boundaries=2), r"boundaries 2 for 4 layers.*such as \[0, 2, 4\]"),
    (lambda: partition(4, 2, costs=2.5), "got the costs 2.5 for 4 layers. Give one cost per"),
    (lambda: partition(4, 2, costs="abcd"), "got the costs 'abcd' for 4 layers. Give one cost"),
    (lambda: stage_ranges(4), "got the boundaries 4. Give rising layer indices"),
    (lambda: min_microbatches(4, "0.9"), "an efficiency target of '0.9'. It must lie between 0"),
    (lambda: RunConfig.from_dict({"a\nb": 1}), r"^a\\nb: there is no such key"),
    (lambda: RunConfig.from_dict({"parallel": "a\nb"}), r"^parallel.a\\nb: there is no such"),
    (lambda: order_to_table("x", [[3]], [0], 1), r"got order=\[\[3\]\]. Give a list for each dev"),
    (lambda: order_to_table("x", [[]], 0, 1), "got placement=0. Give the device of each stage"),
]


@pytest.mark.parametrize(("call", "words"), COMMON, ids=[words[:40] for _, words in COMMON])
def test_errors_say_what_was_got_and_what_to_do(call, words):
    with pytest.raises(AxonDistError, match=words):
        call()


@pytest.mark.full
@pytest.mark.parametrize(("call", "words"), OTHERS, ids=[words[:40] for _, words in OTHERS])
def test_further_errors_say_what_was_got_and_what_to_do(call, words):
    with pytest.raises(AxonDistError, match=words):
        call()


@pytest.mark.full
def test_a_norm_past_32_bits():
    clipped, _ = axon_dist.precision.clip_by_global_norm(NUMBERS, 10**12)
    assert clipped["w"].sum() == 8


def test_statistics_without_arrays_are_the_estimate():
    wrapped = axon_dist.FSDP(NET, GROUP, min_elements=1)
    assert wrapped.memory_stats() == wrapped.memory_estimate()


@pytest.fixture(scope="module")
def step():
    return build()


BATCHES = {
    "None": (None, "the batch is None; give arrays"),
    "empty": ({}, "the batch is an empty dict"),
    "generator": ((BATCH for _ in range(3)), "the batch is a generator; give numpy or JAX arrays"),
    "text": ("x", "the batch is a str"),
    "mixed keys": ({"x": BATCH["x"], 3: BATCH["y"]}, "keys of the batch are of several kinds"),
    "sizes": ({**BATCH, "y": BATCH["y"][:8]}, "every leaf needs the same"),
    "objects": ({**BATCH, "y": np.array([None] * 16)}, "leaf 'y' of the batch is a numpy array"),
    "texts": ({**BATCH, "y": np.array(["a"] * 16)}, "leaf 'y' of the batch is a numpy"),
    "dates": ({**BATCH, "y": np.zeros(16, "datetime64[s]")}, "leaf 'y' of the batch is a numpy"),
    "wide": ({**BATCH, "y": np.full((16, 1), 2**40)}, "leaf 'y' of the batch has the numb"),
    "scalar": ({**BATCH, "y": np.float32(3)}, r"every leaf needs the same.*Shared\(array\)"),
    "odd": ({name: x[:7] for name, x in BATCH.items()}, "a batch of 7 samples does not divide"),
    "none left": ({name: x[:0] for name, x in BATCH.items()}, "a batch of 0 samples"),
}  # fmt: skip


@pytest.mark.sample("odd", "sizes", "texts")
@pytest.mark.parametrize(("batch", "words"), BATCHES.values(), ids=BATCHES)
def test_wrong_batches_raise_clear_errors(step, batch, words):
    with pytest.raises(AxonDistError, match=words):
        step.place(batch)
    with pytest.raises(AxonDistError):
        step.check(batch)


def abstract(step, **changes):
    """A state of host arrays, as nobody has computed it."""
    zeros = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
    made = {
        field: jax.tree.map(zeros, getattr(step.abstract_state, field))
        for field in ("step", "params", "opt_state", "buffers", "scaler", "frozen", "ema")
    }
    return TrainState(**{**made, **changes})


def test_wrong_states_raise_clear_errors(step):
    other = build(model=Net(16))
    momentum = build(optimizer=optax.adam(0.1))
    narrow = abstract(step)
    narrow.params["up"]["kernel"] = narrow.params["up"]["kernel"].astype(np.float16)
    for state, words in [
        (None, "got None for a state; give a TrainState"),
        (BATCH, "got a dict for a state"),
        (TrainState, "got the class TrainState for a state"),
        (abstract(other), r"params/down/kernel is float32\[16, 1\] and must be float32\[8, 1\]"),
        (abstract(momentum), "opt_state.* is not part of this step's state"),
        (abstract(step, params={}), "params/.* is missing"),
        (narrow, r"params/up/kernel is float16\[4, 8\] and must be float32\[4, 8\]"),
    ]:
        for call in (step, step.evaluate, step.gradients):
            with pytest.raises(AxonDistError, match=words):
                call(state, BATCH)
        with pytest.raises(AxonDistError, match=words):
            step.merge(state)


def test_a_state_of_another_strategy(step):
    sharded = build(strategy=axon_dist.fsdp(axes="dp", min_elements=1))
    with pytest.raises(AxonDistError, match=r"has NamedSharding.* and must have NamedSharding"):
        step(sharded.init(), BATCH)


TRAINERS = {
    "step": ({"step": build}, "a Trainer got step=a function; give a TrainStep"),
    "batches": ({"batches": None}, "a Trainer got batches=None; give an iterable of batches"),
    "one batch": ({"batches": BATCH}, "a Trainer got batches="),
    "options": ({"options": {"num_steps": 2}}, "a Trainer got options="),
    "validation": ({"validation": [BATCH]}, "(?s)got validation=.*give a function of no arg"),
    "writers": ({"writers": [print]}, "a Trainer got writers="),
    "a writer": ({"writers": "metrics.jsonl"}, "a Trainer got writers='metrics.jsonl'"),
    "progress": ({"progress": True}, "a Trainer got progress=True"),
    "should_stop": ({"should_stop": 3}, "a Trainer got should_stop=3"),
    "save": ({"save": "here"}, "a Trainer got save='here'"),
    "go_back": ({"go_back": 3}, "a Trainer got go_back=3"),
    "is_saved": ({"is_saved": 3}, "a Trainer got is_saved=3"),
    "history": ({"history": [3]}, "a Trainer got history="),
    "no batch": ({"batches": []}, "there is no batch to train on"),
    "None as batch": ({"batches": [None]}, "the batch is None"),
}  # fmt: skip


@pytest.mark.sample("one batch", "validation")
@pytest.mark.parametrize("name", TRAINERS)
def test_wrong_trainer_arguments_raise_clear_errors(step, name):
    changes, words = TRAINERS[name]
    given = {"step": step, "batches": [BATCH], "options": LoopOptions(num_steps=1), **changes}
    with pytest.raises(AxonDistError, match=words):
        Trainer(**given).fit()


SMALL = axon_dist.models.TransformerConfig(width=8, num_layers=1, num_heads=2, max_length=8)
ARRAYS = {"a": jnp.asarray(np.ones(2, np.float32))}
RNGS = nnx.Rngs(0)
ONE_BY_ONE = {
    "bucket of a text": lambda _: axon_dist.Reduction(bucket_capacity="big"),
    "wrap of a text": lambda _: axon_dist.FSDP(NET, GROUP, auto_wrap_policy="Block"),
    "remat of a text": lambda _: axon_dist.FSDP(NET, GROUP, activation_checkpointing="yes"),
    "remat of a number": lambda _: axon_dist.fsdp(axes="dp", activation_checkpointing=3),
    "min_elements below 0": lambda _: axon_dist.FSDP(NET, GROUP, min_elements=-1),
    "min_elements of a text": lambda _: axon_dist.zero(1, "dp", min_elements="few"),
    "column of 0": lambda _: axon_dist.ColumnParallelLinear(0, 4, rngs=RNGS),
    "column of a text": lambda _: axon_dist.ColumnParallelLinear("4", 4, rngs=RNGS),
    "column without rngs": lambda _: axon_dist.ColumnParallelLinear(4, 4, rngs=None),
    "row below 0": lambda _: axon_dist.RowParallelLinear(4, -4, rngs=RNGS),
    "row of half": lambda _: axon_dist.RowParallelLinear(4, 2.5, rngs=RNGS),
    "MLP of 0": lambda _: axon_dist.ParallelMLP(4, 0, rngs=RNGS),
    "MLP with results of 0": lambda _: axon_dist.ParallelMLP(4, 8, 0, rngs=RNGS),
    "attention of 0 heads": lambda _: axon_dist.TensorParallelAttention(4, 0, rngs=RNGS),
    "attention without rngs": lambda _: axon_dist.TensorParallelAttention(4, 2, rngs=3),
    "Transformer of None": lambda _: axon_dist.models.Transformer(None, rngs=RNGS),
    "Transformer of a name": lambda _: axon_dist.models.Transformer("tiny", rngs=RNGS),
    "Transformer without rngs": lambda _: axon_dist.models.Transformer(SMALL, rngs=None),
    "ViT of another config": lambda _: axon_dist.models.ViT(SMALL, rngs=RNGS),
    "ResNet of another config": lambda _: axon_dist.models.ResNet(SMALL, rngs=RNGS),
    "temperature of a text": lambda _: axon_dist.models.Sampling("1").validate(),
    "temperature that is none": lambda _: axon_dist.models.Sampling(float("nan")).validate(),
    "temperature without end": lambda _: axon_dist.models.Sampling(1e308).validate(),
    "temperature of nothing": lambda _: axon_dist.models.Sampling(1e-308).validate(),
    "top_k of a text": lambda _: axon_dist.models.Sampling(top_k="3").validate(),
    "top_p of a text": lambda _: axon_dist.models.Sampling(top_p="3").validate(),
    "lora of an open bracket": lambda _: axon_dist.lora(NET, 2, "(", rngs=RNGS),
    "compute in 8 bits": lambda _: axon_dist.MixedPrecision(compute="float8_e4m3fn"),
    "retention of a text": lambda _: axon_dist.checkpoint.Retention(last="3"),
    "retention of half": lambda _: axon_dist.checkpoint.Retention(every=2.5),
    "manager of a number": lambda path: axon_dist.checkpoint.CheckpointManager(path, 3),
    "score of a text": lambda path: axon_dist.checkpoint.CheckpointManager(path / "c").save(
        1, ARRAYS, score="low"
    ),
    "score that is none": lambda path: axon_dist.checkpoint.CheckpointManager(path / "c").save(
        1, ARRAYS, score=float("nan")
    ),
    "keys of two kinds": lambda path: axon_dist.save_checkpoint(
        path / "c", {1: jnp.ones(2), "1": jnp.ones(3)}
    ),
    "path with a line break": lambda path: axon_dist.save_checkpoint(path / "a\nb", ARRAYS),
    "files of -1 bytes": lambda path: axon_dist.save_weights(NET, path / "w", max_file=-1),
    "table of None": lambda _: axon_dist.schedule.Schedule.from_csv(None),
    "table of a number": lambda _: axon_dist.schedule.Schedule.from_csv(3),
    "simulate None": lambda _: axon_dist.schedule.simulate(None),
    "simulate costs": lambda _: axon_dist.schedule.simulate(TABLE, 3),
    "validate a text": lambda _: axon_dist.schedule.validate("x"),
    "draw None": lambda _: axon_dist.schedule.draw(None, None),
    "draw in no number of columns": lambda _: axon_dist.schedule.draw(TABLE, width=float("nan")),
    "stages of no array": lambda _: axon_dist.Pipeline.from_modules(
        jnp.ones(0), num_microbatches=2
    ),
    "metrics into a folder": lambda path: axon_dist.train.JsonlWriter(path),
    "weights of a number": lambda _: Costs(stage_weights=3),
    "memory of a text": lambda _: axon_dist.schedule.search(2, 4, memory="x"),
    "memory that is none": lambda _: axon_dist.schedule.search(2, 4, memory=float("nan")),
    "memory of 0": lambda _: axon_dist.schedule.search(2, 4, memory=0),
    "mesh with a hole": lambda _: axon_dist.MeshSpec("dp=4,,tp=1"),
    "mesh of other digits": lambda _: axon_dist.MeshSpec("dp=٤"),
    "mesh of 1_0": lambda _: axon_dist.MeshSpec("dp=1_0"),
    "batch of records": lambda _: build().check({"x": np.zeros(16, [("a", int)])}),
}


@pytest.mark.sample("retention of a text", "metrics into a folder")
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_wrong_argument_raises_a_clear_error(name, tmp_path):
    with pytest.raises(AxonDistError):
        ONE_BY_ONE[name](tmp_path)


TAKES_NUMPY = {
    "MeshSpec": lambda n, _: MeshSpec(dp=n),
    "pairs of a mesh": lambda n, _: MeshSpec((("dp", n),)),
    "World.emulate": lambda n, _: World.emulate(n, {"dp": n}).spec,
    "GradientBucket": lambda n, _: axon_dist.GradientBucket(n).capacity,
    "GradientSynchronizer": lambda n, _: axon_dist.GradientSynchronizer("no_sync", n).ready,
    "plan_buckets": lambda n, _: plan_buckets([(n, 3), (n,)], n).sizes,
    "ddp": lambda n, _: axon_dist.ddp(bucket_capacity=n),
    "fsdp": lambda n, _: axon_dist.fsdp(min_elements=n),
    "zero": lambda n, _: axon_dist.zero(n, min_elements=n),
    "pipelined": lambda n, _: axon_dist.pipelined(n, n, "interleaved_1f1b", chunks=n),
    "ActivationCheckpointing": lambda n, _: axon_dist.ActivationCheckpointing(n).num_saved(n),
    "Quantized": lambda n, _: Quantized("int8", block=n),
    "TopK": lambda _, x: TopK(x),
    "Costs": lambda n, x: Costs(f=n, transfer=x),
    "search": lambda n, x: search(n, n, memory=n).memory + search(n, n, memory=8 * x).memory,
    "validate": lambda n, _: validate(TABLE, max_live=n),
    "lora": lambda n, x: nnx.state(
        axon_dist.lora(Net(), n, alpha=x, alpha_pattern={"up": n}, rngs=nnx.Rngs(0)), nnx.Param
    )["up"].keys(),
    "muon": lambda n, _: muon_of(optax.contrib.MuonDimensionNumbers(n - 2, n - 1)),
    "GradScaler": lambda n, x: axon_dist.GradScaler(n, growth_interval=n, backoff_factor=x),
    "size_of": lambda n, _: size_of(n),
}


@pytest.mark.sample("MeshSpec")
@pytest.mark.parametrize("name", TAKES_NUMPY)
def test_a_number_of_numpy_means_what_that_of_python_means(name):
    call = TAKES_NUMPY[name]
    wanted = call(2, 0.25)
    for kind in (np.int64, np.int32):
        found = call(kind(2), np.float32(0.25))
        assert callable(found) or found == wanted
