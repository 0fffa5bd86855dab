"""A batch that poisons the loss: skipped, held or rolled back, the same as on one device."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import GradScaler, World, build_train_step, compose, ddp, fsdp, pipelined, zero
from axon_dist.core.errors import ConfigError, NonfiniteError
from axon_dist.step import Nonfinite
from axon_dist.train.loop import LoopOptions, SilentProgress, Trainer
from tests.drawn import drawn

WIDTH, SAMPLES = 8, 16


class Chain(nnx.Module):
    """Equal blocks, which a pipeline can cut."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


def make_chain():
    return Chain(nnx.Rngs(0))


def loss_fn(model, batch):
    """A sample with a factor poisons loss and gradients with it."""
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.mean(errors * batch["factor"])


def steep(model, batch):
    """A sample with a factor of 0 leaves the loss finite, and makes its gradient infinite."""
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.mean(jnp.sqrt(errors * batch["factor"]))


def shifted(model, batch):
    """A sample with a factor that is not finite poisons the loss, and no gradient."""
    return loss_fn(model, batch | {"factor": jnp.ones(())}) + jnp.mean(batch["factor"])


def batch_of(number, factor=1.0):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
    factors = np.ones(SAMPLES, np.float32)
    factors[SAMPLES - 1] = factor
    return {"x": x, "y": np.sin(x), "factor": factors}


def build(strategy=None, axes="dp=4", policy="skip", loss=loss_fn, **options):
    world = World.emulate(int(np.prod([int(part.split("=")[1]) for part in axes.split(",")])), axes)
    return build_train_step(
        make_chain(), optax.adam(1e-2), loss, strategy or ddp(), world, nonfinite=policy, **options
    )


def bits(state):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(leaf)).tobytes() for leaf in jax.tree.leaves(state)]


STRATEGIES = {
    "ddp": {},
    "fsdp": {"strategy": fsdp(axes=("dp",), min_elements=8)},
    "zero1": {"strategy": zero(1, min_elements=8)},
    "accumulated": {"accumulate": 2},
    "pipeline": {"strategy": compose(pipelined(2, 2), ddp()), "axes": "pp=2,dp=2"},
}
FACTORS = (1.0, np.nan, 1.0)


def params_of(step, state):
    return jax.tree.leaves(nnx.state(step.merge(state), nnx.Param))


@pytest.fixture(scope="module")
def without_it():
    """The result of plain steps on one device with the two good batches."""
    step = build(axes="dp=1", policy=None)
    state = step.init()
    for number in (0, 2):
        state, _ = step(state, batch_of(number))
    return params_of(step, state)


@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_poisoned_batch_is_skipped_on_all_devices(name, without_it):
    step = build(**STRATEGIES[name])
    state, flags = step.init(), []
    for number, factor in enumerate(FACTORS):
        state, metrics = step(state, batch_of(number, factor))
        flags.append(bool(metrics["nonfinite"]))
    assert (flags, int(state.step)) == ([False, True, False], 3)
    for got, wanted in zip(params_of(step, state), without_it, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("name", ["fsdp", "pipeline"])
def test_the_state_before_is_held_bit_for_bit_without_asking_the_host(name):
    step = build(**STRATEGIES[name], policy="stop")
    placed = [step.place(batch_of(number, factor)) for number, factor in enumerate(FACTORS)]
    state, metrics = step(step.init(), placed[0])
    before = bits(state)
    with jax.transfer_guard("disallow"):
        for batch in placed[1:]:
            state, metrics = step(state, batch, metrics["nonfinite"])
    assert bool(metrics["nonfinite"])
    assert bits(state) == before
    # The name that the argument had before 0.2.
    with pytest.warns(DeprecationWarning, match="held= is deprecated; use was_nonfinite="):
        state, metrics = step(state, placed[2], held=metrics["nonfinite"])
    assert bits(state) == before
    assert step.programs.step._cache_size() == 1


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"scaler": GradScaler()}])
def test_the_norm_of_the_parameters_is_that_of_the_state_also_after_a_skipped_step(options):
    step = build_train_step(
        drawn(make_chain), optax.sgd(0.1), loss_fn, ddp(), World.emulate(2, "dp=2"),
        metrics=("loss", "param_norm"), **options,
    )  # fmt: skip
    batch = {name: np.ones((SAMPLES, WIDTH), np.float32) for name in "xy"}
    batch["factor"] = np.full(SAMPLES, np.nan, np.float32)
    state, metrics = step(step.init(), batch)
    norm = np.sqrt(sum(np.sum(np.asarray(x) ** 2) for x in jax.tree.leaves(state.params)))
    np.testing.assert_allclose(metrics["param_norm"], norm, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"deterministic": "elastic", "logical_shards": 2}])
def test_the_norm_of_parameters_in_half_precision_does_not_overflow(options):
    class Half(nnx.Module):
        def __init__(self):
            self.first = nnx.Param(jnp.full((64, 64), 5, jnp.float16))
            self.second = nnx.Param(jnp.full(320, 5, jnp.float16))

        def __call__(self, x):
            return jnp.sum(x * 0 * self.first[0, 0] * self.second[0], dtype=jnp.float32)

    step = build_train_step(
        Half, optax.sgd(0.1), lambda model, batch: model(batch["x"]),
        ddp(reduce_dtype="float32"), World.emulate(2),
        metrics=("loss", "param_norm"), **options,
    )  # fmt: skip
    _, metrics = step(step.init(), {"x": np.ones(4, np.float16)})
    np.testing.assert_allclose(metrics["param_norm"], 5 * np.sqrt(64 * 64 + 320), rtol=1e-6)


@pytest.mark.parametrize("limit", [None, 1.0])
def test_large_gradients_are_finite_although_their_norm_overflows_but_cannot_be_clipped(limit):
    def straight(model, batch):
        bias = model.blocks[0].bias[...]
        return jnp.mean(batch["slope"]) * jnp.sum(bias - jax.lax.stop_gradient(bias))

    step = build_train_step(
        make_chain, optax.sgd(1e-20), straight, ddp(), World.emulate(2),
        nonfinite="skip", metrics=("loss", "grad_norm"), clip_norm=limit,
    )  # fmt: skip
    before = step.init()
    state, metrics = step(step.init(), {"slope": np.full(4, 1e20, np.float32)})
    assert np.isinf(metrics["grad_norm"])
    assert bool(metrics["nonfinite"]) == (limit is not None)
    moved = before.params["blocks"][0]["bias"] - state.params["blocks"][0]["bias"]
    np.testing.assert_allclose(moved, 1.0 if limit is None else 0.0, rtol=1e-5)


@pytest.mark.parametrize("metrics", [("loss",), ("loss", "grad_norm")])
def test_a_gradient_alone_is_enough(metrics):
    step = build(loss=steep, metrics=metrics)
    state, metrics = step(step.init(), batch_of(0, 0.0))
    assert np.isfinite(metrics["loss"])
    assert bool(metrics["nonfinite"])
    assert all(np.isfinite(leaf).all() for leaf in params_of(step, state))


@pytest.mark.full
@pytest.mark.sample("inf-ddp")
@pytest.mark.parametrize("name", ["ddp", "pipeline"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_loss_alone_is_enough(name, value):
    step = build(**STRATEGIES[name], loss=shifted)
    state = step.init()
    before = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]
    grads, _ = step.gradients(state, batch_of(0, value))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    state, metrics = step(state, batch_of(0, value))
    assert not np.isfinite(metrics["loss"])
    assert bool(metrics["nonfinite"])
    after = jax.tree.leaves((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.full
def test_an_overflow_is_the_business_of_the_scale_until_it_cannot_fall():
    scaler = GradScaler(init_scale=2.0, min_scale=1.0)
    step = build(loss=steep, precision="fp16", scaler=scaler, policy="stop")
    state, found = step.init(), []
    for number, factor in enumerate((0.0, 0.0, 1.0)):
        state, metrics = step(state, batch_of(number, factor))
        found.append((bool(metrics["nonfinite"]), float(state.scaler.scale), int(state.step)))
    assert found == [(False, 1.0, 1), (True, 1.0, 1), (False, 1.0, 2)]
    state, metrics = step(state, batch_of(3, np.nan))
    assert bool(metrics["nonfinite"])


def test_there_are_three_policies():
    with pytest.raises(
        ConfigError, match=r"Nonfinite got 'skp', and has no such member. Did you mean 'skip'\?"
    ):
        build(policy="skp")


# In a run


class Notes(SilentProgress):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Rows(list):
    def write(self, step, metrics):
        self.append((step, dict(metrics)))

    def close(self):
        pass


@pytest.fixture(scope="module")
def steps():
    return {policy: build(policy=policy) for policy in (None, *Nonfinite)}


class Saves:
    """Keeps copies of states, and of how many batches had been handed out."""

    def __init__(self, factors):
        self.states, self.handed, self.factors = {}, 0, dict(factors)

    def batches(self):
        for number in itertools.count(1):
            self.handed = number
            yield batch_of(number, self.factors.get(number, 1.0))

    def save(self, state, number, loss):
        assert int(state.step) == number
        self.states[number] = (jax.tree.map(jnp.copy, state), self.handed)

    def give_back(self, count):
        self.handed -= count

    def go_back(self):
        return jax.tree.map(jnp.copy, self.states[max(self.states)][0]) if self.states else None


def fit(step, saves, num_steps=8, **options):
    notes, rows = Notes(), Rows()
    trainer = Trainer(
        step=step, batches=saves.batches(), progress=notes, writers=[rows], save=saves.save,
        give_back=saves.give_back, go_back=saves.go_back,
        options=LoopOptions(num_steps=num_steps, **{"log_every": 2, **options}),
    )  # fmt: skip
    return trainer, notes.notes, rows


@pytest.mark.sample("2")
@pytest.mark.parametrize("save_every", [0, 2])
def test_stopping_keeps_the_state_before_and_gives_the_batches_back(steps, save_every):
    saves = Saves({4: np.nan})
    trainer, _, _ = fit(steps["stop"], saves, save_every=save_every)
    with pytest.raises(NonfiniteError, match=r"^step 4: the loss is nan; the state is that of ste"):
        trainer.fit()
    assert sorted(saves.states) == ([2, 3] if save_every else [3])
    kept, handed = saves.states[3]
    assert handed == 3

    state = steps["stop"].init()
    for number in (1, 2, 3):
        state, _ = steps["stop"](state, batch_of(number))
    assert bits(kept) == bits(state)


def test_the_first_step_and_the_last_are_seen_too(steps):
    for bad in (1, 3):
        saves = Saves({bad: np.inf})
        with pytest.raises(NonfiniteError, match=f"step {bad}: the loss is inf"):
            fit(steps["stop"], saves, num_steps=3)[0].fit()
        assert sorted(saves.states) == ([] if bad == 1 else [2])


def test_skipping_counts_and_tells(steps):
    saves = Saves({3: np.nan, 5: np.nan, 6: np.nan})
    trainer, notes, rows = fit(steps["skip"], saves)
    result = trainer.fit()
    assert (result.reason, result.num_steps, result.skipped_steps) == ("finished", 8, 3)
    assert notes == [
        "1 step skipped, 1 so far; step 3: the loss is nan",
        "2 steps skipped, 3 so far; step 5: the loss is nan",
    ]
    counts = [(step, row["train/skipped_steps"]) for step, row in rows]
    assert counts == [(2, 0), (4, 1), (6, 3), (8, 3)]
    assert [step for step, row in rows if "train/loss" in row] == [2, 4, 8]
    assert all(np.isfinite(loss) for _, loss in result.train_curve)
    assert all("train/nonfinite" not in row for _, row in rows)


def test_layer_scan_back_goes_on_past_the_batches(steps):
    saves = Saves({5: np.nan})
    trainer, notes, _ = fit(steps["rollback"], saves, save_every=3)
    result = trainer.fit()
    assert (result.num_steps, result.rollbacks) == (8, 1)
    assert notes == [
        "step 5: the loss is nan: went back to step 3, continuing with the next batches "
        "(rollback 1 of 3)"
    ]
    # Steps 1 to 3; batches 4 to 6 are given up, the last of them because save 6 looked first.
    state = steps["rollback"].init()
    for number in (1, 2, 3, 7, 8, 9, 10, 11):
        state, _ = steps["rollback"](state, batch_of(number))
    assert bits(result.state) == bits(state)


def test_layer_scan_back_ends(steps):
    saves = Saves(dict.fromkeys(range(3, 100), np.nan))
    trainer, notes, _ = fit(steps["rollback"], saves, save_every=2, max_rollbacks=2)
    with pytest.raises(NonfiniteError, match=r"step 3: the loss is nan after 2 rollbacks; the st"):
        trainer.fit()
    assert (len(notes), sorted(saves.states)) == (2, [2])
    saves = Saves({2: np.nan})
    with pytest.raises(NonfiniteError, match="step 2: the loss is nan; the state is that of step "):
        fit(steps["rollback"], saves)[0].fit()
    assert sorted(saves.states) == [1]


@pytest.mark.parametrize(
    ("lost", "options", "advice"),
    [
        (2, {}, r"no checkpoint to go back to; that state is saved now\. Resume the run, as --res"),
        (1, {}, "no checkpoint to go back to. Lower .*; nonfinite='skip' needs no checkpoint"),
        (4, {"save_every": 2, "max_rollbacks": 1}, r"max_rollbacks=1 allows no more\. Lower .*; r"),
    ],
)
def test_the_advice_after_a_rollback_that_was_not_possible_is_not_a_rollback(
    steps, lost, options, advice
):
    saves = Saves(dict.fromkeys(range(lost, 100), np.nan))
    with pytest.raises(NonfiniteError, match=advice) as error:
        fit(steps["rollback"], saves, **options)[0].fit()
    assert "goes back to a checkpoint" not in str(error.value)


@pytest.mark.parametrize(
    ("answers", "advice"),
    [
        ([True], r"go back to; that state is saved\. Resume the run"),
        ([False, True], r"go back to; that state is saved now\. Resume the run"),
        ([False, False], r"go back to; that state could not be saved\. Lower .*; make room for"),
    ],
)
def test_the_advice_says_whether_the_last_state_is_saved(steps, answers, advice):
    trainer, _, _ = fit(steps["rollback"], Saves({2: np.nan}))
    asked = mock.Mock(side_effect=answers)
    with pytest.raises(NonfiniteError, match=advice):
        dataclasses.replace(trainer, is_saved=asked).fit()


def test_layer_scan_back_needs_somewhere_to_go(steps):
    trainer = Trainer(
        step=steps["rollback"], batches=[batch_of(0)], options=LoopOptions(num_steps=1)
    )
    with pytest.raises(ConfigError, match=r"nonfinite='rollback', but the trainer has no go_back"):
        trainer.fit()
    with pytest.raises(ConfigError, match="max_rollbacks=0, an int; give a whole number"):
        LoopOptions(num_steps=1, max_rollbacks=0).validate()


@pytest.mark.full
def test_a_step_without_a_policy_stops_too_and_saves_nothing_poisoned(steps):
    saves = Saves({3: np.nan})
    with pytest.raises(NonfiniteError, match=r"step 3: the loss is nan\. Lower the learning rate"):
        fit(steps[None], saves, save_every=1)[0].fit()
    assert sorted(saves.states) == [1, 2]

    saves = Saves({3: 0.0})
    with pytest.raises(NonfiniteError, match="the parameters after step 3 are not finite"):
        fit(build(policy=None, loss=steep), saves, save_every=1)[0].fit()
    assert sorted(saves.states) == [1, 2]


class Counting(nnx.Module):
    """Keeps an accuracy, whose total is a float and whose count is an integer, and draws."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.accuracy = nnx.metrics.Accuracy()
        self.key = nnx.Variable(jax.random.key(3))


def counting_loss(model, batch):
    model.key[...] = jax.random.split(model.key[...])[0]
    logits = model.linear(model.dropout(batch["x"]))
    model.accuracy.update(logits=logits, labels=batch["labels"])
    return jnp.mean(logits**2 * batch["factor"][:, None])


def test_a_skipped_step_keeps_neither_the_total_nor_the_count_of_a_metric():
    make = lambda: Counting(nnx.Rngs(0, dropout=1))
    step = build_train_step(
        make, optax.sgd(0.1), counting_loss, ddp(), World.emulate(2, "dp=2"), nonfinite="skip"
    )
    x = np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32)
    state = step.init()
    seen, keys = [], []
    for factor in (1.0, np.nan):
        batch = {"x": x, "labels": np.zeros(SAMPLES, np.int32)}
        state, _ = step(state, batch | {"factor": np.full(SAMPLES, factor, np.float32)})
        model = step.merge(state)
        accuracy = model.accuracy
        keys.append(jax.random.key_data(model.key[...]).tolist())
        seen.append([float(accuracy.total[...]), int(accuracy.count[...])])
    assert seen[1] == seen[0]
    assert seen[0][1] == SAMPLES
    assert int(model.dropout.rngs.count[...]) == 2
    assert keys[0] != keys[1]
