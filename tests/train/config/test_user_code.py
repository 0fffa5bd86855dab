"""User-defined models, losses, data and optimizers, by dotted path."""

import itertools
import json

import jax
import numpy as np
import optax
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import hardware
from axon_dist.parallel.tensor_plan import Plan
from axon_dist.train.app import config_plans, evaluate, plan_config, train, verify
from axon_dist.train.config import RunConfig, build_strategy, load_config
from axon_dist.train.config.read import write
from tests.first_state import begun
from tests.one_device import trained

MODULE = """
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, width=16, *, rngs):
        self.up = nnx.Linear(4, width, rngs=rngs)
        self.down = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))[..., 0]

class Named(Net):
    def __call__(self, x):
        rows = jax.sharding.PartitionSpec("rows", None)
        return super().__call__(jax.lax.with_sharding_constraint(x, rows))

class Language(nnx.Module):
    def __init__(self, *, rngs):
        self.table, self.head = nnx.Embed(256, 8, rngs=rngs), nnx.Linear(8, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table(tokens))

def squares(model, batch, scale=1.0):
    return scale * jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

def scaled(scale):
    return lambda model, batch: squares(model, batch, scale)

def numbers(count=40):
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    rows = [{"x": a, "y": float(a.sum())} for a in x]
    return rows[8:], rows[:8]

def decayed(rate, num_steps):
    return optax.sgd(optax.linear_schedule(rate, 0.0, num_steps))

def no_rngs(width): ...
def linen(*, rngs): return flax.linen.Dense(3)
def nothing(): return None
number = 3
class Space: inner = staticmethod(nothing)
"""


NAMED = {
    "mesh": "dp=2",
    "devices": {"emulate": 2},
    "parallel": "ddp",
    "model": {"factory": "own_things:Named"},
    "optimizer": {"name": "sgd"},
    "axis_names": {"rows": ["dp"]},
}
"""A run of a model that names axes of a mesh."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_things.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import os\n1 / 0\n")
    (tmp_path / "own_lacking.py").write_text("import no_such_thing_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


def plain(**changes):
    return {
        "run_dir": "run",
        "devices": {"emulate": 4},
        "mesh": "dp=2,tp=2",
        "parallel": {"ddp": {}, "tensor": {"plan": {"up$": "column", "down$": "row"}}},
        "model": {"factory": "own_things:Net", "width": 8},
        "data": {"factory": "own_things:numbers"},
        "loss": {"function": "own_things.squares", "scale": 2.0},
        "optimizer": {"factory": "own_things:decayed", "rate": 0.1},
        "train": {"steps": 4, "global_batch": 8, "log_every": 1, "eval_every": 2},
        "checkpoint": {"every": 2},
    } | changes


def test_a_run_of_own_things_is_that_of_one_device_and_goes_on(folder):
    done = train(RunConfig.from_dict(plain()))
    config = load_config(done.directory.config)
    assert config == RunConfig.from_dict(plain())
    assert write(config.loss) == {"function": "own_things.squares", "scale": 2.0}
    again = train(
        load_config(done.directory.config, ["run_dir=again"]),
        resume="run/checkpoints/step_00000002",
    )

    from flax import nnx
    from own_things import Net, squares

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(0.1, 0, 4))
    )
    loader = config.kind.task.load(None, config.data, global_batch=8)
    batches = itertools.islice(loader, len(done.result.train_curve))
    loss_fn = lambda model, batch: squares(model, batch, 2.0)
    make = nnx.jit(lambda: Net(8, rngs=nnx.Rngs(0)))
    expected = trained(make(), optimizer, loss_fn, batches)
    np.testing.assert_allclose([x for _, x in done.result.train_curve], expected, rtol=1e-5)
    leaves = [jax.tree.leaves(run.result.state.params) for run in (done, again)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert json.loads(done.directory.summary.read_text())["unit"] == ""


# The default run verifies a model of one's own on text, below.
@pytest.mark.full
def test_own_things_are_verified(folder):
    assert verify(RunConfig.from_dict(plain()), steps=2).passed


def test_plans_of_a_model_that_names_axes_are_on_every_mesh(folder, monkeypatch):
    monkeypatch.setattr(config_plans, "MOST", 4)
    monkeypatch.setattr(config_plans, "FEW", 0)
    ranking = plan_config(RunConfig.from_dict(plain(**NAMED)), hardware("h100"), 2)
    assert ranking.refused == ()
    named = {one.candidate.name: one.config.axis_names["rows"] for one in ranking.plans}
    assert named == {"ddp": ("dp",), "zero1": ("dp",), "zero2": ("dp",), "fsdp": ("fsdp",)}


@pytest.mark.full
def test_a_run_of_a_model_that_names_axes_is_evaluated_on_any_mesh(folder):
    run = begun(RunConfig.from_dict(plain(**NAMED)))
    own = evaluate(run, trust=True).metrics["loss"]
    for mesh, parallel in (("fsdp=2", "fsdp"), ("dp=1,tp=2", "ddp")):
        other = (f"mesh={mesh}", f"parallel={parallel}")
        found = evaluate(run, overrides=other, trust=True)
        assert (found.mesh, found.metrics["loss"]) == (mesh, pytest.approx(own))
    with pytest.raises(ConfigError, match=r"axis_names maps 'rows' to the axis 'tp', which the"):
        evaluate(run, overrides=(*other, "mesh=dp=2", "axis_names={rows: [tp]}"), trust=True)


def test_a_loss_by_its_factory_and_a_lone_path(folder):
    made = RunConfig.from_dict(plain(loss={"factory": "own_things:scaled", "scale": 3.0}))
    lone = RunConfig.from_dict(plain(loss="own_things:squares", model="own_things:Net"))
    batch = {"x": np.ones(3), "y": np.zeros(3)}
    assert float(made.kind.task.loss_fn(lambda x: x, batch)) == 3.0
    assert float(lone.kind.task.loss_fn(lambda x: x, batch)) == 1.0
    assert (lone.model.path, dict(lone.model.options)) == ("own_things:Net", {})


def test_an_own_language_model_reads_text(folder, tiny):
    small = {"model": {"factory": "own_things:Language"}, "mesh": "dp=2", "devices": {"emulate": 2}}
    config = RunConfig.from_dict(tiny | small)
    assert (config.kind.task.item, config.loss) == ("tokens", None)
    assert verify(config, steps=1).passed


def test_a_plan_of_patterns_keeps_its_order(make_world):
    given = {"down$": "row", "(up|down)$": "column"}
    config = RunConfig.from_dict({"parallel": {"tensor": {"plan": given}}})
    assert list(config.to_dict()["parallel"]["tensor"]["plan"]) == list(given)
    strategy = build_strategy(config.parallel, None, make_world("tp=2"))
    assert strategy.params.plan == Plan.of(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"factory": "own_thing:Net"}},
            r"^model.factory: there is no module 'own_thing', neither in /.* nor on "
            r"Python's path; correct the path, or start in the folder that contains it",
        ),
        (
            {"model": {"factory": "own_things:Nat"}},
            r"^model.factory: the module own_things has no 'Nat'. Did you mean 'Net'\?",
        ),
        (
            {"model": {"factory": "own_things:Space.iner"}},
            r"^model.factory: Space has no 'iner'. Did you mean 'inner'\?",
        ),
        (
            {"model": {"factory": "Net"}},
            r"^model.factory: got 'Net', which must be the path of a function or class, "
            r"such as package.module:name",
        ),
        (
            {"model": {"factory": 3}},
            r"^model: got 3, which must be a path such as package.module:name",
        ),
        (
            {"model": {"factory": "own_things:number"}},
            r"^model.factory: own_things:number is 3 and must be a function or class",
        ),
        (
            {"model": {"factory": "own_broken:Net"}},
            r"importing own_broken fails with ZeroDivisionError: .*own_broken.py:2\)",
        ),
        (
            {"model": {"factory": "own_lacking:Net"}},
            r"importing own_lacking fails with ModuleNotFoundError: No module named "
            r"'no_such_thing_anywhere'",
        ),
        (
            {"model": {"factory": "own_things:Net", "widht": 8}},
            r"^model.widht: own_things:Net takes no such argument. Did you mean 'width'\?",
        ),
        (
            {"model": {"factory": "own_things:Net", "rngs": 8}},
            r"^model.rngs: the run itself passes this argument to own_things:Net; leave it out",
        ),
        (
            {"model": {"factory": "own_things:no_rngs", "width": 1}},
            r"^model.factory: own_things:no_rngs takes \(width\), but is called with width and "
            r"rngs, an nnx.Rngs: got an unexpected keyword argument 'rngs'; .* accept the others",
        ),
        (
            {"optimizer": {"factory": "own_things:decayed"}},
            r"^optimizer.factory: own_things:decayed takes \(rate, num_steps\), but is called with "
            r"num_steps: missing a required argument: 'rate'; set the missing keys next to factory",
        ),
        (
            {"optimizer": {"factory": "own_things:nothing"}},
            r"^optimizer.factory: own_things:nothing returns a NoneType, which must be an "
            r"optax.GradientTransformation",
        ),
        (
            {"model": {"factory": "own_things:Net", "kind": "vit"}},
            r"^model: got factory and kind, which exclude each other; leave one of them out",
        ),
        (
            {"loss": None},
            r"^loss: missing, but a user-defined model with user-defined data has no default; set "
            r"loss: \{function:",
        ),
        (
            {"loss": {"factory": "own_things:squares"}},
            r"^loss.factory: own_things:squares takes a model, so it is itself a loss, .* "
            r"write loss: \{function: own_things:squares\}",
        ),
        (
            {"loss": {"factory": "own_things:nothing"}},
            r"^loss.factory: own_things:nothing returns a NoneType, which must be a "
            r"function of a model and",
        ),
        (
            {"loss": {"function": "own_things:nothing"}},
            r"^loss.function: own_things:nothing takes \(\), but is called with a model and "
            r"a batch",
        ),
        (
            {"loss": {"function": "own_things:squares", "batch": 1}},
            r"^loss.batch: own_things:squares takes no such argument. Valid: scale",
        ),
        (
            {"loss": "mean"},
            r"^loss: got 'mean', which must be \{function: package.module:name\} or",
        ),
        (
            {"data": {"factory": "own_things:numbers", "num_ahead": -1}},
            r"^data.num_ahead: got -1, which must be a whole number, at least 0",
        ),
        (
            {"parallel": {"tensor": {"plan": {"up$": "colum"}}}},
            r"^parallel.tensor.plan.up\$: there is no 'colum'. Did you mean 'column'\?",
        ),
    ],
)
def test_mistakes_are_reported_when_read(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(plain(**changes))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"plan": "auot"},
            r"no plan is called 'auot'. Did you mean 'auto'\?.* Or give patterns, such",
        ),
        (
            {"plan": {"up(": "column"}},
            r"'up\(': this pattern is not a regular expression: missing \)",
        ),
    ],
)
def test_plans_that_are_none(make_world, parallel, message):
    with pytest.raises(ConfigError, match=message):
        build_strategy({"tensor": parallel}, None, make_world("tp=2"))


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        (
            "model",
            "linen",
            r"returns a Dense, which must be an nnx.Module; wrap it, nnx.bridge.ToNNX",
        ),
        ("data", "nothing", r"returns a NoneType, which must be two sequences of samples"),
    ],
)
def test_the_result_of_a_factory_is_checked(folder, section, name, message):
    config = RunConfig.from_dict(plain(**{section: {"factory": f"own_things:{name}"}}))
    with pytest.raises(ConfigError, match=rf"^{section}.factory: own_things:{name} {message}"):
        config.model.make(rngs=None) if section == "model" else config.data.samples
