"""Values of the right kind that are wrong all the same: odd dtypes, endless trees, other worlds.

Every row is refused before anything is compiled, in a second or two, by an error of the library.
The default run tries the rows that a first script has: nested lists, a loss per sample, a rate in
quotes, a mesh as the world; `-m full` tries the others.
"""

import collections
import itertools
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axon_dist
from axon_dist import MeshSpec, World
from axon_dist.core.errors import AxonDistError
from axon_dist.planner import parse_count
from axon_dist.schedule import Costs, build_schedule, draw, simulate, to_svg
from axon_dist.train import app
from axon_dist.train.loop import LoopOptions, Trainer

SECONDS = 5


class Net(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def mean_square(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


WORLD, FOUR = World.emulate(8), World.emulate(4)
GROUP = WORLD.group("dp")
NET = Net()
BATCH = {"x": np.ones((16, 4), np.float32), "y": np.ones((16, 1), np.float32)}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)


def build(**changes):
    given = {"model": NET, "optimizer": optax.sgd(0.1), "loss_fn": mean_square}
    given |= {"strategy": axon_dist.ddp(), "world": WORLD}
    return axon_dist.build_train_step(**{**given, **changes})


@pytest.fixture(scope="module")
def step():
    return build()


def deleted(shape=(16, 4)):
    array = jnp.ones(shape)
    array.delete()
    return array


def endless():
    tree = {"x": BATCH["x"]}
    tree["me"] = [tree, tree]
    return tree


def deep(levels=2000, around=lambda inner: {"a": inner}):
    tree = BATCH
    for _ in range(levels):
        tree = around(tree)
    return tree


def refused(call, words="."):
    started = time.process_time()
    with pytest.raises(AxonDistError, match=words) as caught:
        call()
    assert 15 < len(str(caught.value)) < 1500
    assert time.process_time() - started < SECONDS


LEAVES = {
    "long double": (np.ones((16, 4), np.longdouble), "is a numpy array of <f16, which JAX lacks"),
    "other byte order": (np.ones((16, 4), ">f4"), "is a numpy array of >f4, which JAX lacks"),
    "other order of integers": (np.ones((16, 4), ">i4"), "is a numpy array of >i4"),
    "masked": (np.ma.ones((16, 4)), "is a masked array, and JAX ignores the mask"),
    "deleted": (deleted, "was deleted, or donated"),
    "shape": (SHAPES["x"], "contains a shape, float32.*instead of an array"),
    "time span": (np.zeros((16, 4), "m8[s]"), "numpy array of timedelta64"),
    "structured": (np.zeros((16, 4), [("a", "f4")]), "give numbers or booleans"),
    "void": (np.zeros((16, 4), "V4"), "give numbers or booleans"),
    "bytes": (b"abc", "is a bytes"),
    "too large": (np.full((16, 4), 1e300), r"has the number 1e\+300, which needs more than the 32"),
    "too large unsigned": (np.full((16, 4), 2**63, np.uint64), "the number 9223372036854775808"),
    "too large beside nan": (np.full((16, 4), [np.nan, 0, 1e300, 0]), r"the number 1e\+300"),
    "too large beside inf": (np.full((16, 4), [np.inf, -np.inf, 1e300, 0]), r"number 1e\+300"),
    "too small beside nan": (np.full((16, 4), [0, np.nan, -1e300, 0]), r"the number -1e\+300"),
    "too large complex": (np.full((16, 4), 1 - 1e300j), r"-1e\+300, .* keeps of complex128"),
    "too large and shared": (axon_dist.Shared(np.array([np.nan, 1e300])), r"number 1e\+300"),
    "half an array": (types.SimpleNamespace(shape=(16, 4), dtype=np.float32), "SimpleNamespace"),
    "lists": ([[1.0] * 4] * 16, "and 57 more.*a list is as many leaves"),
    "ragged lists": ([[1.0] * 4] * 15 + [[1.0]], "more.*a list is as many leaves"),
    "set": ({1, 2}, "is a set"),
    "function": (len, "builtin_function_or_method"),
    "other length": (np.ones((15, 4), np.float32), "every leaf needs the same"),
}  # fmt: skip


@pytest.mark.sample("lists")
@pytest.mark.parametrize("name", LEAVES)
def test_leaves_of_a_batch(step, name):
    leaf, words = LEAVES[name]
    leaf = deleted() if leaf is deleted else leaf
    refused(lambda: step.place({**BATCH, "x": leaf}), words)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "int8"])
def test_narrow_numbers_of_numpy_are_those_of_jax(step, dtype):
    leaf = np.ones((16, 4)).astype(jnp.dtype(dtype))
    placed = step.place({**BATCH, "x": leaf})
    found = next(x for x in jax.tree.leaves(placed) if x.shape == leaf.shape and x.dtype == dtype)
    np.testing.assert_array_equal(found, leaf)


@pytest.mark.full
def test_numbers_that_have_no_width_pass(step):
    step.place({**BATCH, "x": np.full((16, 4), [np.nan, np.inf, -np.inf, 3e38])})


TREES = {
    "itself": endless,
    "deep": deep,
    "deep lists": lambda: deep(300, lambda inner: [inner]),
    "number": lambda: 3,
    "text in it": lambda: {**BATCH, "name": "x"},
    "set": lambda: {1, 2},
    "state of a model": lambda: nnx.state(NET),
    "counter of nothing": lambda: collections.Counter(),
    "empty list": lambda: [],
    "dict of nothing": lambda: {"x": {}, "y": []},
    "user dict": lambda: collections.UserDict(BATCH),
    "proxy": lambda: types.MappingProxyType(BATCH),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TREES)
def test_trees_that_are_no_batch(step, name):
    refused(lambda: step.place(TREES[name]()))
    # JAX would have less room to recurse for good, after one that has no end.
    assert step.check(SHAPES) is None


LOSSES = {
    "complex": lambda m, b: mean_square(m, b) + 1j,
    "truth": lambda m, b: mean_square(m, b) > 0,
    "whole": lambda m, b: mean_square(m, b).astype(int),
    "list of one": lambda m, b: mean_square(m, b)[None],
    "dict": lambda m, b: {"loss": mean_square(m, b)},
    "text": lambda m, b: "low",
    "with None": lambda m, b: (mean_square(m, b), None),
    "with a number as name": lambda m, b: (mean_square(m, b), {1: 2.0}),
    "with a text": lambda m, b: (mean_square(m, b), {"a": "x"}),
    "with a dict": lambda m, b: (mean_square(m, b), {"a": {"b": 1.0}}),
    "with a vector": lambda m, b: (mean_square(m, b), {"a": m(b["x"])}),
    "with its own name": lambda m, b: (mean_square(m, b), {"loss": 1.0}),
    "three": lambda m, b: (mean_square(m, b), {}, {}),
    "weight None": lambda m, b: axon_dist.Weighted(m(b["x"]).sum(), None),
    "weight of texts": lambda m, b: axon_dist.Weighted("a", "b"),
    "weight in weight": lambda m, b: axon_dist.Weighted(axon_dist.Weighted(1.0, 1.0), 1.0),
    "vector in weight": lambda m, b: axon_dist.Weighted(m(b["x"]), 16.0),
    "with gradients": nnx.value_and_grad(mean_square),
}


@pytest.mark.sample("list of one", "with a vector")
@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_returns(name):
    refused(lambda: build(loss_fn=LOSSES[name], batch=SHAPES), "loss")


def test_an_error_of_a_loss_is_kept_and_names_the_batch():
    with pytest.raises(TypeError) as caught:
        build(loss_fn=lambda m, b: m(b["x"]).reshape(3).mean(), batch=SHAPES)
    (note,) = (x for x in caught.value.__notes__ if x.startswith("raised by"))
    assert (
        note
        == "raised by loss_fn(model, batch) for a batch of x: float32[16, 4], y: float32[16, 1]"
    )


def test_library_errors_inside_a_loss_do_not_blame_the_loss():
    with pytest.raises(TypeError) as caught:
        build(loss_fn=lambda m, b: axon_dist.precision.all_finite("x"), batch=SHAPES)
    (note,) = (x for x in caught.value.__notes__ if "loss_fn" in x)
    assert note.startswith("while axon_dist traced loss_fn(model, batch) for a batch of x: float32")


class Raises(nnx.Linear):
    def __call__(self, x):
        raise RuntimeError("not today")


class Layers(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.down = Raises(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(self.up(x))


def test_a_method_of_the_users_that_the_library_calls_is_named():
    plan = axon_dist.tensor_parallel({"up$": "column", "down$": "row"})
    with pytest.raises(RuntimeError) as caught:
        build(model=Layers, strategy=plan, world=World.emulate(2, "tp=2"), batch=SHAPES)
    (note,) = (x for x in caught.value.__notes__ if "loss_fn" in x)
    assert note.startswith(
        "raised by Raises.__call__, which axon_dist.parallel.tensor calls, within loss_fn(model"
    )


TABLE = {"rate": 1.0}


def rate_of(name):
    return TABLE[name]


def test_a_key_of_another_table_is_not_said_to_be_of_the_batch():
    with pytest.raises(KeyError, match="decay"):
        build(loss_fn=lambda m, b: mean_square(m, b) * rate_of("decay"), batch=SHAPES)
    refused(lambda: build(loss_fn=lambda m, b: b["z"].mean(), batch=SHAPES), "looks up 'z'")


def updates(change):
    return optax.GradientTransformation(lambda params: (), lambda u, s, p=None: change(u, s))


OPTIMIZERS = {
    "updates alone": (updates(lambda u, s: u), "returned a dict; it must return a tuple"),
    "None": (updates(lambda u, s: None), "returned a NoneType; it must return a tuple"),
    "three": (updates(lambda u, s: (u, s, s)), "returned a tuple; it must return a tuple"),
    "other tree": (updates(lambda u, s: ({}, s)), "returned updates of PyTreeDef.*same structure"),
    "other state": (updates(lambda u, s: (u, (s, 1))), "returned a state of PyTreeDef"),
    "other shapes": (updates(lambda u, s: (jax.tree.map(jnp.sum, u), s)), r"update of shape \(\)"),
    "raises": (updates(lambda u, s: 1 / 0), "cannot work on the parameters.*division by zero"),
    "text as rate": (optax.sgd("0.1"), "cannot work on the parameters"),
    "rate of None": (optax.sgd(lambda count: None), "cannot work on the parameters"),
    "line search": (optax.lbfgs(), "calls the loss itself.*value_fn.* such as optax.adamw"),
    "hessian": (optax.contrib.sophia(0.1), "calls the loss itself.*obj_fn.* such as optax.adamw"),
    "own gradients": (
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        "calls the loss itself.*grad_fn.*opaque_mode=False",
    ),
    "two copies": (
        optax.lookahead(optax.sgd(0.1), 2, 0.5),
        "keeps two copies of the parameters.*optimizer that optax.lookahead wraps",
    ),
    "mask of others": (optax.masked(optax.sgd(0.1), lambda p: {"no": True}), "cannot work on"),
    "two functions": ((len, len), "optimizer is a tuple"),
}  # fmt: skip


@pytest.mark.sample("text as rate", "line search")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_returns(name):
    optimizer, words = OPTIMIZERS[name]
    refused(lambda: build(optimizer=optimizer), words)


class Part(nnx.Module):
    def __init__(self, value, kind=nnx.Param):
        self.part = kind(value)

    def __call__(self, x):
        return x


def dead():
    model = Net()
    jax.tree.map(lambda x: x.delete(), nnx.state(model))
    return model


MODELS = {
    "no parameters": (lambda: Part(jnp.ones(2), nnx.BatchStat), "has no nnx.Param"),
    "whole numbers": (lambda: Part(jnp.ones(2, int)), "has dtype int32, which has no grad"),
    "truths": (lambda: Part(jnp.ones(2, bool)), "has dtype bool"),
    "deleted": (dead, "of the model was deleted"),
    "shapes": (lambda: nnx.eval_shape(Net), "is a shape and not an array"),
    "factory of None": (lambda: lambda: None, "returned a NoneType"),
    "factory of a class": (lambda: lambda: Net, "returned a"),
    "factory with arguments": (lambda: lambda width: Net(), "cannot be called without arguments"),
    "state": (lambda: nnx.state(NET), "model is a State"),
    "halves": (lambda: nnx.split(NET), "model is a tuple"),
    "dict": (lambda: {"w": jnp.ones(2)}, "model is a dict"),
}  # fmt: skip


@pytest.mark.sample("factory with arguments")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_trained(name):
    make, words = MODELS[name]
    refused(lambda: build(model=make()), words)


OPTIONS = {
    "accumulate more": ({"accumulate": 3, "batch": SHAPES}, "does not divide"),
    "accumulate half": ({"accumulate": 2.0}, "."),
    "clip at nothing": ({"clip_norm": 0}, "."),
    "clip NaN": ({"clip_norm": float("nan")}, "."),
    "clip text": ({"clip_norm": "1"}, "."),
    "precision 16": ({"precision": 16}, "."),
    "precision of 64 bits": ({"precision": axon_dist.MixedPrecision}, "."),
    "remat true": ({"remat": True}, "."),
    "scaler class": ({"scaler": axon_dist.GradScaler}, "."),
    "metrics None": ({"metrics": None}, "."),
    "unknown metric": ({"metrics": ("nonsense",)}, "."),
    "nonfinite": ({"nonfinite": "explode"}, "."),
    "ema of one": ({"ema": 1.0}, "."),
    "ema NaN": ({"ema": float("nan")}, "."),
    "trainable bracket": ({"trainable": "("}, "."),
    "trainable nothing": ({"trainable": nnx.LoRAParam}, "."),
    "frozen dtype": ({"frozen_dtype": "float99"}, "."),
    "strategy of another axis": ({"strategy": axon_dist.ddp("tp")}, "tp"),
    "another world's group": (
        {"strategy": axon_dist.DDP(NET, FOUR.group("dp"))},
        r"DistributedDataParallel is over a group of a mesh dp=4, but the step is for a world of "
        r"dp=8.*give it world.group\('dp'\)",
    ),
    "a wrapper of another model": (
        {"strategy": axon_dist.DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), GROUP)},
        r"DistributedDataParallel wraps a Linear, but the model passed to build_train_step is a "
        r"Net whose weights have other paths or shapes; pass its .module as the model, or its "
        r".strategy as the strategy",
    ),
    "a mesh as world": ({"world": WORLD.mesh}, "world is a Mesh"),
    "a group as world": ({"world": GROUP}, "world is a ProcessGroup"),
    "batch of none": ({"batch": {"x": None}}, "."),
    "batch odd": ({"batch": {name: x[:7] for name, x in BATCH.items()}}, "7 samples"),
    "compiler options": ({"compiler_options": 3}, "."),
}  # fmt: skip


@pytest.mark.sample("a mesh as world")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_step(name):
    changes, words = OPTIONS[name]
    refused(lambda: build(**changes), words)


@pytest.mark.full
@pytest.mark.parametrize(
    "odd",
    ["a", -1, 1.5, 2**40, jax.random.key(0), NET, {"up": 3}, [1]],
    ids=lambda x: type(x).__name__,
)
def test_a_first_state_takes_weights_alone(step, odd):
    refused(lambda: step.init(odd), "init got weights=.*arrays by path")


def test_states_without_their_arrays(step, tmp_path):
    state = step.init()
    jax.tree.map(lambda x: x.delete(), state.params)
    refused(lambda: step(state, BATCH), "params/down/bias was deleted")
    refused(lambda: step(step.abstract_state, BATCH), "ShapeDtypeStruct, not an array")
    for kind in ("sharded", "full"):
        refused(lambda kind=kind: axon_dist.save_checkpoint(tmp_path / kind, state, type=kind),
                "was deleted, or donated to a step")  # fmt: skip


STACKED = jnp.asarray(np.ones((8, 8), np.float32))
COLLECTIVES = {
    "sum": lambda x: axon_dist.all_reduce_sum(x, GROUP),
    "mean": lambda x: axon_dist.all_reduce_mean(x, GROUP),
    "max": lambda x: axon_dist.all_reduce_max(x, GROUP),
    "gather": lambda x: axon_dist.all_gather(x, GROUP),
    "scatter sum": lambda x: axon_dist.reduce_scatter_sum(x, GROUP),
    "all to all": lambda x: axon_dist.all_to_all(x, GROUP, 0, 0),
    "shift": lambda x: axon_dist.shift(x, GROUP),
    "sync": lambda x: axon_dist.sync_gradients(x, GROUP),
}
ARRAYS = {
    "masked": lambda: np.ma.ones((8, 8)),
    "other byte order": lambda: np.ones((8, 8), ">f4"),
    "deleted": lambda: deleted((8, 8)),
    "keys of two kinds": lambda: {1: STACKED, "a": STACKED},
    "random keys": lambda: jax.random.split(jax.random.key(0), 8),
    "objects": lambda: np.array([object()] * 8),
    "itself": endless,
}


@pytest.mark.full
@pytest.mark.parametrize(("call", "name"), list(itertools.product(COLLECTIVES, ARRAYS)))
def test_arrays_of_collectives(call, name):
    refused(lambda: COLLECTIVES[call](ARRAYS[name]()))


ONE_BY_ONE = {
    "dim of a text": lambda: axon_dist.all_gather(STACKED, GROUP, dim="0"),
    "dims of texts": lambda: axon_dist.all_to_all(STACKED, GROUP, "a", "b"),
    "dims of None": lambda: axon_dist.all_to_all(STACKED, GROUP, None, None),
    "dim of a half": lambda: axon_dist.all_gather(STACKED, GROUP, dim=0.5),
    "bucket of texts": lambda: axon_dist.GradientBucket(4, "abc"),
    "bucket of flags": lambda: axon_dist.GradientBucket(4, bool),
    "endless ranks": lambda: WORLD.new_group(itertools.count()),
    "ranks without end": lambda: WORLD.new_group(range(10**12)),
    "one device twice": lambda: World.init("dp=-1", [jax.devices()[0]] * 2),
    "devices in rows": lambda: World.init("dp=2,tp=4", WORLD.mesh.devices.reshape(2, 4)),
    "backend": lambda: axon_dist.Backend("abacus"),
    "mesh of a set": lambda: MeshSpec({"dp"}),
    "mesh of halves": lambda: MeshSpec({"dp": 8.0}),
    "mesh of truth": lambda: MeshSpec({"dp": True}),
    "mesh without a name": lambda: MeshSpec({"": 8}),
    "rule without a pattern": lambda: axon_dist.tensor_parallel({3: "column"}),
    "adapters in int8": lambda: axon_dist.lora(NET, 2, rngs=nnx.Rngs(0), param_dtype="int8"),
    "adapters in nothing": lambda: axon_dist.lora(NET, 2, rngs=nnx.Rngs(0), dtype="abc"),
    "matrices of a number": lambda: axon_dist.hidden_matrices(3),
    "matrices of a wrapper": lambda: axon_dist.hidden_matrices(axon_dist.DDP(NET, GROUP)),
    "64 bits": lambda: axon_dist.MixedPrecision(compute="float64"),
    "64 bits of a model": lambda: axon_dist.models.TransformerConfig(dtype="float64").validate(),
    "width of a half": lambda: axon_dist.models.TransformerConfig(width=8.0).validate(),
    "width of None": lambda: axon_dist.models.TransformerConfig(width=None).validate(),
    "dropout of a text": lambda: axon_dist.models.TransformerConfig(dropout="0.1").validate(),
    "theta of a text": lambda: axon_dist.models.TransformerConfig(rope_theta="1").validate(),
    "a flag of a text": lambda: axon_dist.models.TransformerConfig(tied_head="no").validate(),
    "a flag of a number": lambda: axon_dist.models.TransformerConfig(gated=1).validate(),
    "program of a number": lambda: axon_dist.inspect.flops(3),
    "calls without end": lambda: axon_dist.train.time_step(len, 10**12),
    "MLP of a text": lambda: axon_dist.models.MLP("34", rngs=nnx.Rngs(0)),
    "MLP of one": lambda: axon_dist.models.MLP((3,), rngs=nnx.Rngs(0)),
    "MLP of halves": lambda: axon_dist.models.MLP((3, 2.5), rngs=nnx.Rngs(0)),
    "MLP without rngs": lambda: axon_dist.models.MLP((3, 4), rngs=0),
    "embedding of halves": lambda: axon_dist.VocabParallelEmbedding(4.5, 4, rngs=nnx.Rngs(0)),
    "embedding of none": lambda: axon_dist.VocabParallelEmbedding(0, 4, rngs=nnx.Rngs(0)),
    "labels of another shape": lambda: axon_dist.models.cross_entropy(
        jnp.ones((2, 3)), jnp.ones(3, int)
    ),
    "loss without tokens": lambda: axon_dist.models.next_token_loss(NET, {"x": BATCH["x"]}),
    "loss without a batch": lambda: axon_dist.models.next_token_loss(NET, None),
    "classes without labels": lambda: axon_dist.models.classification_loss(NET, {"x": 3}),
    "parts of a number": lambda: axon_dist.load_checkpoint("/none", {}, parts=3),
    "kept weights of a number": lambda: axon_dist.load_weights(NET, "/none", keep=3),
    "plan for None": lambda: parse_count(None),
    "picture of None": lambda: to_svg(None),
    "picture over a number": lambda: to_svg(build_schedule("1f1b", 2, 4), 3),
    "drawing over a text": lambda: draw(build_schedule("1f1b", 2, 4), "x"),
    "peaks of None": lambda: axon_dist.schedule.peak_live(None),
    "slots of a text": lambda: axon_dist.schedule.assign_slots("1f1b"),
    "far apart": lambda: draw(
        build_schedule("1f1b", 4, 8),
        simulate(build_schedule("1f1b", 4, 8), Costs(stage_weights=(1e-9, 1, 1, 1))),
    ),
    "far too long": lambda: draw(
        build_schedule("gpipe", 2, 2), simulate(build_schedule("gpipe", 2, 2), Costs(1e50, 1e50))
    ),
    "state of a number": lambda: Trainer(
        step=build(), batches=[BATCH], options=LoopOptions(num_steps=1)
    ).fit(3),
    "run of None": lambda: app.train(None),
    "run of a dict": lambda: app.train({"train": {"steps": 1}}),
    "run of a path": lambda: app.dry_run("configs/quickstart.yaml"),
    "verify None": lambda: app.verify(None),
    "tune None": lambda: app.tune(None),
    "examine None": lambda: app.examine(None),
    "data of None": lambda: app.check_data(None),
}


@pytest.mark.sample("labels of another shape")
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one(name):
    refused(ONE_BY_ONE[name])


@pytest.mark.sample("bert")
@pytest.mark.parametrize(
    "text",
    ["{}", "[1]", '{"model_type": "bert"}', '{"model_type": "llama"}',
     '{"model_type": "llama", "hidden_size": "a"}', '{"model_type": "gpt2", "n_embd": null}',
     '{"model_type": ["llama"]}', f'{{"model_type": "{"x" * 5000}"}}'],
    ids=["empty", "list", "bert", "no sizes", "text", "null", "list as type", "long type"],
)  # fmt: skip
def test_configs_of_a_hub(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused(lambda: axon_dist.hub_config(tmp_path))


def test_a_change_of_a_hub_config_that_is_none(tmp_path):
    sizes = '"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32'
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", ' + sizes + "}")
    refused(lambda: axon_dist.hub_config(tmp_path, widht=3), "has no field 'widht'")
