"""Several processes train to the losses of one."""

import json
import os
import sys

import jax
import pytest

from axon_dist.launch import LaunchPlan, launch
from axon_dist.train.app import train
from axon_dist.train.config import load_config
from axon_dist.train.loop import has_module

pytestmark = pytest.mark.multiprocess

CONFIG = """
name: tiny
devices: {{emulate: 4}}
mesh: {{dp: 4}}
model: {{width: 16, num_layers: 1, num_heads: 2, ffn_width: 32, max_length: 16, gated: false}}
data:
  files: [{texts}/train.txt]
  validation_files: [{texts}/validation.txt]
  sequence_length: 16
optimizer: {{name: adamw, learning_rate: 0.01, schedule: {{name: constant}}}}
train: {{steps: 4, global_batch: 8, eval_every: 2, eval_batches: 1, log_every: 1}}
checkpoint: {{every: 0}}
"""

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""As `conftest.py` of the root has them: less is compiled."""

STRATEGIES = {
    "ddp": ["mesh=dp=4", "parallel=ddp"],
    "fsdp": ["mesh=fsdp=4", "parallel=full_shard"],
    "dropout": ["mesh=fsdp=4", "parallel=full_shard", "train.accumulate=2", "model.dropout=0.3"],
    "words": [
        "mesh=fsdp=4",
        "parallel=full_shard",
        "train.accumulate=2",
        "model={factory: tests.words:Words, dropout: 0.3}",
    ],
    "hybrid": ["mesh=dp=2,fsdp=2", "parallel=hybrid_shard"],
    "other order": ["mesh=dp=2,fsdp=2", "parallel=[fsdp, ddp]", "model.dropout=0.3"],
    "accumulated": ["mesh=dp=4", "parallel=ddp", "train.accumulate=2"],
    "tensor": ["mesh=dp=2,tp=2", "parallel={tensor: {plan: auto}, ddp: {}}"],
    "diloco": [
        "mesh=nodes=2,fsdp=2",
        "parallel={diloco: {every: 2}, full_shard: {min_elements: 8}}",
        "train.nonfinite=skip",
    ],
    "pipeline": ["mesh=pp=4", "parallel={pipeline: {num_microbatches: 4}}", "model.num_layers=4"],
}


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path)


def config_in(folder):
    for name in ("train", "validation"):
        (folder / f"{name}.txt").write_text(f"{name}: the quick brown fox jumps. " * 99)
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(texts=folder))
    return path


def losses_in(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], key): row[key] for row in rows for key in row if key.endswith("loss")}


def of_one_process(path, overrides):
    folder = path.parent / "one"
    train(load_config(path, [*overrides, f"run_dir={folder}"]))
    return losses_in(folder)


def launched(folder, command, count):
    """What each process of a launched run prints; if one fails, the message shows all."""
    memory, logs = folder / "memory", folder / "logs"
    memory.mkdir()
    plan = LaunchPlan(command=(sys.executable, *command), num_processes=count, log_dir=logs)
    told = []
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("NPROC", raising=False)
        environment.setenv("XLA_FLAGS", FLAGS)
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        environment.setenv("AXON_MEMORY", str(memory))
        cache = jax.config.values["jax_compilation_cache_dir"]
        environment.setenv("JAX_COMPILATION_CACHE_DIR", cache)
        code = launch(plan, told.append)
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in range(count)]
    assert code == 0, "\n".join([*told, *texts])
    return texts


def arguments_of_many(path, overrides):
    copies, folder = "checkpoint.memory_every=2", f"run_dir={path.parent / 'many'}"
    return ["train", str(path), "--resume", "auto", *overrides, copies, folder]


def assert_trains_as_one_process(path, overrides, said, count):
    expected = of_one_process(path, overrides)
    assert len(expected) == 6
    assert losses_in(path.parent / "many") == pytest.approx(expected, rel=1e-5)
    for process in range(count):
        assert f"process {process}  host " in said


# The default run trains "words" in the processes of the other programs of this file, below.
CASES = [
    pytest.param(name, count, marks=pytest.mark.full if full else pytest.mark.slow)
    for name in STRATEGIES
    for count in (2, 4)
    for full in [(name, count) == ("dropout", 2)]
]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_the_losses_of_one_process(config, name, count):
    overrides = STRATEGIES[name]
    command = ("-m", "axon_dist.train.cli", *arguments_of_many(config, overrides))
    said, *_ = launched(config.parent, command, count)
    assert_trains_as_one_process(config, overrides, said, count)


TOGETHER = """
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import World, build_train_step, ddp
from axon_dist.train.loop import LoopOptions, Trainer

world = World.emulate(4, "dp=-1")
loss = lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2)
model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
step = build_train_step(model, optax.sgd(0.0), loss, ddp(), world)
batches = [{"x": np.ones((4, 2), np.float32)}] * 9

def run(history, state=None, **options):
    # Only process 0 reads what earlier calls wrote.
    return Trainer(
        step=step, batches=batches, validation=lambda: batches[:1],
        options=LoopOptions(eval_every=2, **options),
        history=history if world.process_index == 0 else (),
    ).fit(state)

result = run([{"step": 0, "validation/loss": 0.0}], num_steps=9, patience=2)
print("patient", result.reason, "after", result.num_steps, flush=True)

for patience in (0, 1):
    state = Trainer(step=step, batches=batches, options=LoopOptions(num_steps=2)).fit().state
    history = [{"step": 1, "validation/loss": -1.0}, {"step": 2, "train/loss": 1.0}]
    result = run(history, state, num_steps=4, patience=patience)
    steps = [number for number, _ in result.validation_curve if number > 1]
    print(result.reason, "after", result.num_steps, "validated", steps, flush=True)
"""


@pytest.mark.full
def test_processes_of_which_one_knows_earlier_validations_act_together(texts_of_two):
    """They stop early together, and make up for an aborted validation together."""
    for said in texts_of_two:
        assert "patient early stopping after 4" in said
        assert "finished after 4 validated [2, 4]" in said
        assert "early stopping after 2 validated [2]" in said


ARRAYS = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from axon_dist import Shared, Weighted, World, build_train_step, ddp, tensor_parallel
from axon_dist.core.errors import ConfigError, LaunchError
from axon_dist.core.weighted import FilledBatch

World.emulate(4)
one_of_each = [device for device in jax.devices() if device.id == min(
    other.id for other in jax.devices() if other.process_index == device.process_index
)]
world = World.init("dp=-1", devices=one_of_each)
me = world.process_index
model = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
own = NamedSharding(world.mesh, PartitionSpec("dp"))
spread_over_processes = lambda x: jax.make_array_from_process_local_data(own, x)

# Each process has its own rows.
def loss(model, batch):
    return Weighted(jnp.sum(jnp.mean(model(batch["x"]) ** 2, -1)), jnp.sum(batch["w"]))

rows = np.arange(16, dtype=np.float32).reshape(4, 4) + 100 * me
ones = np.ones(4, np.float32)
for count in (1, 2):
    step = build_train_step(model, optax.sgd(0.0), loss, ddp(), world, accumulate=count)
    for name, x, w in (
        ("numpy", rows, ones), ("some", rows, jnp.asarray(ones)), ("jax", jnp.asarray(rows), ones),
        ("spread", spread_over_processes(rows), jnp.asarray(ones)),
    ):
        batch, state = {"x": x, "w": w}, step.init()
        step.check(batch, own_rows=True)
        evaluated = float(step.evaluate(state, batch)["loss"])
        trained = float(step(state, batch)[1]["loss"])
        print("own rows", name, count, evaluated, trained, flush=True)

# Each process has its own rows, whose number has to be padded.
def loss(model, batch):
    each = jnp.mean(model(batch["x"]) ** 2, -1)
    return Weighted(jnp.sum(batch["w"] * each), jnp.sum(batch["w"]))

rows = np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * me
spread = spread_over_processes(rows)
step = build_train_step(model, optax.sgd(0.0), loss, ddp(), world, accumulate=2, pad="w")
for name, x in (("numpy", rows), ("spread", spread)):
    print("padded", name, float(step(step.init(), {"x": x})[1]["loss"]), flush=True)
try:
    step(step.init(), {"x": spread, "y": rows})
except ConfigError as error:
    print(error.code, flush=True)

# The processes share the samples: each has all rows.
def loss(model, batch):
    each = model(batch["x"]) * batch["scale"] * jax.random.uniform(batch["key"], minval=1.0)
    return jnp.mean(each)

world = World.init("tp=-1", devices=one_of_each)
mine = lambda x: jax.device_put(x, jax.local_devices()[0])
rows = np.ones((2, 4), np.float32)
step = build_train_step(model, optax.sgd(0.0), loss, tensor_parallel({"kernel": "column"}), world)
key = jax.random.key(0)
try:
    step(step.init(), {"x": rows + me, "scale": Shared(np.float32(3)), "key": Shared(key)})
except LaunchError as error:
    print(error.code, str(error), flush=True)
for name, put in (("numpy", lambda x: x), ("jax", jnp.asarray), ("mine", mine)):
    shared = {"scale": Shared(put(np.float32(3))), "key": Shared(put(key))}
    batch = {"x": put(rows), **shared}
    filled = FilledBatch(batch, samples=batch)
    evaluated = float(step.evaluate(step.init(), filled)["loss"])
    trained = float(step(step.init(), batch)[1]["loss"])
    print("all rows", name, evaluated, trained, flush=True)
"""


def test_jax_arrays_of_one_process_are_its_rows_and_spread_ones_those_of_all(texts_of_two):
    sums = [4 * 1.5 + 16 * row + 400 * process for process in (0, 1) for row in range(3)]
    mean = sum(one**2 for one in sums) / 6
    for text in texts_of_two:
        for name in ("numpy", "some", "jax", "spread"):
            for count in (1, 2):
                assert f"own rows {name} {count} 93220.0 93220.0" in text
        said = [line.split() for line in text.splitlines()]
        padded = {words[1]: float(words[2]) for words in said if words[:1] == ["padded"]}
        assert padded == pytest.approx({"numpy": mean, "spread": mean}, rel=1e-6)
        assert ["pad-mixed-leaves"] in said
        for name in ("numpy", "jax", "mine"):
            assert f"all rows {name} 12.0 12.0" in text, text
        assert "rows-of-processes-differ the processes disagree about 'batch': " in text
        assert "process 1 has rows of x" in text


ROWS = """
import json, warnings
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import Weighted, World, build_train_step, compose, ddp, fsdp
from axon_dist import diloco, tensor_parallel
from axon_dist.core.errors import AxonDistWarning, LaunchError
from axon_dist.data import Loader, Sequences

x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
y = np.stack([np.sin(x[:, 0]), x[:, 1]], -1)
arrays = {"x": x, "y": y}
losses = {}

class Model(nnx.Module):
    def __init__(self, rate):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x):
        x = self.linear(x)
        return x if self.dropout is None else self.dropout(x)

def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

def by_place(model, batch):
    each = (model(batch["x"]) - jnp.roll(batch["y"], 1, 0)) ** 2
    return jnp.mean(each * jnp.arange(len(each), dtype=jnp.float32)[:, None])

def weighted(model, batch):
    each = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return Weighted(jnp.sum(each * batch["w"]), jnp.sum(batch["w"]))

def built(mesh, strategy, rate=0.5, loss=squares, order=None, **options):
    world = World.emulate(4, mesh)
    if order is not None:
        world = World.init(mesh, devices=[jax.devices()[n] for n in order])
    return build_train_step(lambda: Model(rate), optax.sgd(0.1), loss, strategy, world, **options)

def record(name, mesh, strategy, **options):
    step = built(mesh, strategy, **options)
    rows, state = step.own_rows(16), step.init()
    losses[name] = []
    for _ in range(2):
        state, metrics = step(state, {"x": x[rows], "y": y[rows]})
        losses[name].append(float(metrics["loss"]))
    return step, state

two = "dp=2,fsdp=2"
swapped = compose(fsdp(min_elements=1), ddp())
step, _ = record("swapped", two, swapped, accumulate=2)

cut = {"accumulate": 2, "separable": False}
placed, state = record("by place", two, swapped, rate=0, loss=by_place, **cut)
rows = placed.own_rows(16, evaluated=True)
losses["evaluated"] = [float(placed.evaluate(state, {"x": x[rows], "y": y[rows]})["loss"])]

for rate in (0, 0.5):
    filled = built("dp=4", ddp(), rate=rate, loss=weighted, pad="w")
    rows = filled.own_rows(6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", AxonDistWarning)
        for _ in range(2):
            metrics = filled(filled.init(), {"x": x[rows], "y": y[rows]})[1]
    if not rate:
        losses["padded"] = [float(metrics["loss"])]
    print("warned", rate, [one.message.code for one in seen], flush=True)
"""

OTHER_ROWS = """
record("devices", "dp=4", ddp(), order=(0, 2, 1, 3), accumulate=2)
inner = compose(diloco("fsdp", every=2), ddp())
record("replicas", two, inner, accumulate=2)
tensor = compose(ddp(), tensor_parallel({"linear/kernel": "column"}))
split, _ = record("tensor", "tp=2,dp=2", tensor)

# The loader gives the rows of the step.
layout, world = step.batch_layout, step.world
samples = Sequences(*[[{n: a[i] for n, a in arrays.items()} for i in range(16)]] * 2, "numbers")
loader = Loader(
    samples, global_batch=16, num_microbatches=2, share=world.parts_of_batch(layout.axes)
)
whole = next(Loader(samples, global_batch=16))
assert (next(loader)["x"] == whole["x"][step.own_rows(16)]).all()

if world.num_processes > 1:
    # These processes share all rows, and give different ones.
    half = x[:8] + world.process_index
    try:
        split(split.init(), {"x": half, "y": y[:8]})
    except LaunchError as error:
        print(error.code, str(error), flush=True)

print(json.dumps(losses), flush=True)
"""


TRAIN = """
import sys
from axon_dist.train.cli.main import main

assert main(sys.argv[1:]) == 0
"""


@pytest.fixture(scope="module")
def config_of_two(tmp_path_factory):
    return config_in(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def texts_of_two(config_of_two):
    """What each of two processes prints that run the short programs of this file one by one."""
    last = "print(json.dumps(losses), flush=True)"
    program = "\n".join((ROWS, last, ARRAYS, TOGETHER, TRAIN))
    arguments = arguments_of_many(config_of_two, STRATEGIES["words"])
    return launched(config_of_two.parent, ("-c", program, *arguments), 2)


def test_a_config_trains_to_the_losses_of_one_process(texts_of_two, config_of_two):
    assert_trains_as_one_process(config_of_two, STRATEGIES["words"], texts_of_two[0], 2)
    if has_module("matplotlib"):
        assert (config_of_two.parent / "many" / "loss.png").read_bytes().startswith(b"\x89PNG")


def losses_of(said):
    return json.loads([line for line in said.splitlines() if line.startswith("{")][-1])


def assert_losses_are_those_of_one_process(texts, program, capsys):
    exec(program, {"__name__": "rows"})
    expected = losses_of(capsys.readouterr().out)
    for said in texts:
        losses = losses_of(said)
        assert losses.keys() == expected.keys()
        for name, values in expected.items():
            assert losses[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.full
def test_rows_that_are_not_consecutive_train_as_on_one_process(texts_of_two, capsys):
    program = ROWS + "\nprint(json.dumps(losses))"
    assert_losses_are_those_of_one_process(texts_of_two, program, capsys)
    for said in texts_of_two:
        assert "warned 0 []" in said
        assert "warned 0.5 ['pad-moves-samples']" in said


@pytest.mark.full
def test_rows_of_any_ranks_train_as_on_one_process(tmp_path, capsys):
    texts = launched(tmp_path, ("-c", ROWS + OTHER_ROWS), 2)
    assert_losses_are_those_of_one_process(texts, ROWS + OTHER_ROWS, capsys)
    for said in texts:
        assert "rows-of-processes-differ the processes disagree about 'batch': " in said
        assert "process 1 has rows of x[0:4, 0:4]=" in said
