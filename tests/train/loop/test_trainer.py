import dataclasses
import itertools
import json
import math
import signal
import threading
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError, NonfiniteError
from axon_dist.core.weighted import Weighted
from axon_dist.mesh import World
from axon_dist.parallel import ddp
from axon_dist.step import Nonfinite, StepOptions, build_train_step
from axon_dist.train.loop import JsonlWriter, LoopOptions, SilentProgress, Trainer, trainer


class ListWriter:
    def __init__(self):
        self.rows = []

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self):
        pass

    def curve(self, name):
        return [(step, row[name]) for step, row in self.rows if name in row]


class NotingProgress(SilentProgress):
    def __init__(self):
        self.notes, self.statuses, self.phases = [], [], []

    def phase(self, text):
        self.phases.append(text)
        return super().phase(text)

    def update(self, status):
        self.statuses.append(status)

    def note(self, text):
        self.notes.append(text)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeState:
    step: Any
    params: Any
    frozen: Any = dataclasses.field(default_factory=dict)


class FakeStep:
    """A fake step: the loss of step n is `losses[n - 1]`, and a hook runs before each step."""

    def __init__(self, world, losses=None, before=lambda number: None):
        self.options = StepOptions()
        self.model_spec = types.SimpleNamespace(
            params={"w": jnp.ones(3)}, frozen={}, abstract=nnx.Linear(1, 3, rngs=nnx.Rngs(0))
        )
        self.world, self.losses, self.before = world, losses, before
        self.batches, self.taken = [], 0

    def check(self, batch, *, own_rows=False):
        self.checked = batch

    def init(self):
        return FakeState(jnp.int32(0), {"w": jnp.ones(3)})

    def __call__(self, state, batch, was_nonfinite=None):
        self.taken += 1
        self.before(self.taken)
        self.batches.append(batch)
        loss = float(self.taken) if self.losses is None else self.losses[self.taken - 1]
        return FakeState(state.step + 1, state.params), {"loss": jnp.float32(loss)}

    def evaluate_sums(self, state, batch, *, ema=False):
        return {"loss": Weighted(jnp.float32(batch + 100 * int(state.step)), jnp.float32(1))}


def fit(step, num_steps, *, log_every=1, eval_every=0, save_every=0, state=None, **kwargs):
    options = LoopOptions(
        num_steps=num_steps, log_every=log_every, eval_every=eval_every, save_every=save_every
    )
    batches = kwargs.pop("batches", itertools.count())
    return Trainer(step=step, batches=batches, options=options, **kwargs).fit(state)


def test_equals_the_plain_loop(world):
    data = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
    loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), world, ema=0.5)
    batches = [{"x": x} for x in data]
    result = fit(step, 6, batches=batches, validation=lambda: batches[:2])

    state, losses = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert result.train_curve == tuple(enumerate(losses, start=1))
    np.testing.assert_array_equal(result.state.params["kernel"], state.params["kernel"])
    # If there is a moving average, it is the result of a run.
    evaluate = lambda batch: float(step.evaluate(state, batch, ema=True)["loss"])
    validation = np.mean([evaluate(batch) for batch in batches[:2]])
    assert result.validation_curve == ((6, pytest.approx(validation)),)
    assert (result.reason, result.num_steps, result.is_finished) == ("finished", 6, True)
    assert result.compile_seconds > 0
    assert result.train_seconds > 0
    # kernel and bias and their averages in float32, the step in int32; SGD has no state.
    assert result.device_bytes == 2 * 4 * (3 + 1) + 4


def test_records_are_means_and_the_last_one_is_short(world):
    writer = ListWriter()
    result = fit(FakeStep(world), 7, log_every=3, writers=[writer])
    assert writer.curve("train/loss") == [(3, 2.0), (6, 5.0), (7, 7.0)]
    assert result.train_curve == ((3, 2.0), (6, 5.0), (7, 7.0))


def test_validates_every_so_often_and_once_at_the_end(world):
    writer = ListWriter()
    step = FakeStep(world)
    result = fit(step, 6, eval_every=2, validation=lambda: [1, 2, 3, 4], writers=[writer])
    expected = [(number, 2.5 + 100 * number) for number in (2, 4, 6)]
    assert writer.curve("validation/loss") == expected
    assert list(result.validation_curve) == expected


def test_never_more_than_three_steps_run_ahead(world):
    ahead = []
    progress = NotingProgress()

    def before(number):
        seen = progress.statuses[-1].step if progress.statuses else 0
        ahead.append(number - 1 - seen)

    fit(FakeStep(world, before=before), 20, progress=progress)
    assert max(ahead) == 2
    assert progress.statuses[-1].step == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_under_way(world, number):
    def before(step):
        if step == 4:
            signal.raise_signal(number)

    saved, writer, progress = [], ListWriter(), NotingProgress()
    step = FakeStep(world, before=before)
    handler = signal.getsignal(number)
    result = fit(
        step, 100, log_every=10, eval_every=50, validation=lambda: [0], writers=[writer],
        progress=progress, save=lambda *saving: saved.append(saving),
    )  # fmt: skip
    assert (result.reason, result.num_steps, step.taken) == (number.name, 4, 4)
    assert not result.is_finished
    assert [(int(state.step), number, loss) for state, number, loss in saved] == [(4, 4, None)]
    assert writer.curve("train/loss") == [(4, 2.5)]
    assert signal.getsignal(number) is handler
    assert [note for note in progress.notes if note.startswith(f"{number.name}: stopping")]


@pytest.mark.parametrize(
    ("num_steps", "every", "expected"),
    [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 0, [3]), (1, 1, [1]), (2, 5, [2])],
)
def test_saves_now_and_then_and_at_the_end_once(world, num_steps, every, expected):
    saved = []

    def save(state, number, loss):
        assert int(state.step) == number
        saved.append(number)

    result = fit(FakeStep(world), num_steps, save_every=every, save=save)
    assert (saved, result.num_steps) == (expected, num_steps)


def test_a_save_gets_the_validation_loss_of_its_own_state(world):
    saved = []
    fit(
        FakeStep(world), 5, save_every=1, eval_every=2, validation=lambda: [1],
        save=lambda state, number, loss: saved.append((number, loss)),
    )  # fmt: skip
    assert saved == [(1, None), (2, 201.0), (3, None), (4, 401.0), (5, 501.0)]


def test_batches_drawn_before_a_save_are_in_the_state(world):
    handed, step = [], FakeStep(world)

    def batches():
        for number in itertools.count():
            handed.append(number)
            yield number

    def save(state, number, loss):
        assert handed == step.batches == list(range(number))

    fit(step, 4, save_every=1, save=save, batches=batches())


@pytest.fixture
def usual_interrupt():
    """Python's own handler, which a process started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_as_usual(world, usual_interrupt):
    def before(step):
        if step == 2:
            # Raised in this thread, because two signals sent to the process may be merged.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(FakeStep(world, before=before), 5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_runs_outside_the_main_thread_too(world):
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(FakeStep(world), 3)))
    thread.start()
    thread.join()
    assert results[0].reason == "finished"


@pytest.mark.parametrize(
    ("eval_every", "save_every", "saved_at"), [(2, 0, 4), (2, 2, 4), (0, 0, 6)]
)
def test_a_signal_in_a_validation_ends_it_and_saves(world, eval_every, save_every, saved_at):
    seen, saved, progress = [], [], NotingProgress()

    def validation():
        for number in range(100):
            if len(progress.statuses) >= saved_at and number == 5:
                signal.raise_signal(signal.SIGTERM)
            seen.append(number)
            yield number

    result = fit(
        FakeStep(world), 6, eval_every=eval_every, save_every=save_every, validation=validation,
        save=lambda state, number, loss: saved.append((number, loss)), progress=progress,
    )  # fmt: skip
    assert seen[-1] == 5
    assert result.num_steps == saved_at
    assert saved[-1] == (saved_at, None)
    assert (result.reason, result.is_interrupted) == ("SIGTERM", True)
    assert f"SIGTERM: aborted the validation after step {saved_at}" in progress.notes
    assert [step for step, _ in result.validation_curve] == list(range(2, saved_at, 2))[:eval_every]


def recorded(*validated, steps):
    """The records of a run after some steps, of which these were validated."""
    rows = [{"step": step, "train/loss": 1.0} for step in range(1, steps + 1)]
    return rows + [{"step": step, "validation/loss": 3.0} for step in validated]


@pytest.mark.parametrize(
    ("at", "history", "validated", "saved"),
    [
        # The validation of step 4 was aborted.
        (4, recorded(2, steps=4), [2, 4, 6, 7], [(4, 400.0), (6, 600.0), (7, 700.0)]),
        (4, recorded(2, 4, steps=4), [2, 4, 6, 7], [(6, 600.0), (7, 700.0)]),
        (5, recorded(2, 4, steps=5), [2, 4, 6, 7], [(6, 600.0), (7, 700.0)]),
        # The folder may be another than that of the validation.
        (4, [], [6, 7], [(6, 600.0), (7, 700.0)]),
        # Only the last validation was aborted.
        (7, recorded(2, 4, 6, steps=7), [2, 4, 6, 7], [(7, 700.0)]),
    ],
)
def test_a_resumed_run_makes_up_for_an_aborted_validation(world, at, history, validated, saved):
    seen, drawn = [], []
    step = FakeStep(world)
    result = fit(
        step, 7, eval_every=2, save_every=2, history=history, validation=lambda: [0],
        batches=(drawn.append(n) or n for n in itertools.count()),
        state=FakeState(jnp.int32(at), {"w": jnp.ones(3)}),
        save=lambda state, number, score: seen.append((number, score, len(drawn))),
    )  # fmt: skip
    assert (result.reason, result.num_steps, step.taken) == ("finished", 7, 7 - at)
    assert [number for number, _ in result.validation_curve] == validated
    assert [(number, score) for number, score, _ in seen] == saved
    # A state is saved with the position in the data, so no batch is drawn ahead of it.
    assert [count for *_, count in seen] == [number - at for number, _ in saved]
    assert len(result.step_percentiles) == (4 if at < 6 else 0)


def test_a_signal_in_the_validation_of_the_start_ends_the_run_before_a_step(world):
    def validation():
        signal.raise_signal(signal.SIGTERM)
        return [0, 1]

    saved, step = [], FakeStep(world)
    result = fit(
        step, 7, eval_every=2, validation=validation, history=recorded(2, steps=4),
        state=FakeState(jnp.int32(4), {"w": jnp.ones(3)}),
        save=lambda state, number, score: saved.append((number, score)),
    )  # fmt: skip
    assert (result.reason, result.is_interrupted, result.num_steps) == ("SIGTERM", True, 4)
    assert (saved, step.taken) == ([(4, None)], 0)


@pytest.mark.parametrize(
    ("patience", "at", "validated", "last"),
    [(2, 6, (2, 4, 6), 6), (3, 6, (2, 4, 6), 8), (2, 7, (2, 4, 6), 8), (2, 6, (2, 4), 6)],
)
def test_a_run_that_stopped_early_takes_no_step_unless_it_may_wait_longer(
    world, patience, at, validated, last
):
    step = FakeStep(world)
    options = LoopOptions(num_steps=20, eval_every=2, patience=patience)
    result = Trainer(
        step=step, batches=itertools.count(), options=options, validation=lambda: [0],
        history=recorded(*validated, steps=at),
    ).fit(FakeState(jnp.int32(at), {"w": jnp.ones(3)}))  # fmt: skip
    assert (result.reason, result.num_steps, step.taken) == ("early stopping", last, last - at)


def test_should_stop_reads_the_records(world):
    step = FakeStep(world, losses=[5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.25, 0.1])
    result = fit(step, 8, should_stop=lambda record: record["train/loss"] <= 3.0)
    # The record of step 3 is available two steps later.
    assert (result.reason, result.num_steps) == ("should_stop", 5)


def test_a_text_that_should_stop_returns_is_the_reason(world):
    result = fit(FakeStep(world), 8, should_stop=lambda record: "an hour has passed")
    assert (result.reason, result.is_interrupted) == ("an hour has passed", False)
    result = fit(FakeStep(world), 8, should_stop=lambda record: "SIGTERM")
    assert (result.reason, result.is_interrupted) == ("should_stop: SIGTERM", False)


def test_ends_with_the_data(world):
    result = fit(FakeStep(world), 10, batches=[0, 1, 2])
    assert (result.reason, result.num_steps) == ("out of data", 3)


def test_goes_on_from_a_state_and_takes_only_the_batches_it_needs(world):
    step, batches = FakeStep(world), iter(range(100))
    result = fit(step, 5, state=FakeState(jnp.int32(3), {"w": jnp.ones(3)}), batches=batches)
    assert (result.num_steps, step.taken) == (5, 2)
    assert next(batches) == 2


def test_phases_and_statuses(world):
    progress = NotingProgress()
    fit(FakeStep(world), 4, eval_every=2, validation=lambda: [7], progress=progress)
    assert progress.phases == [
        "initializing", "compiling the train step", "compiling the validation"
    ]  # fmt: skip
    last = progress.statuses[-1]
    assert (last.step, last.num_steps, last.loss, last.validation_loss) == (4, 4, 4.0, 407.0)
    assert last.device_bytes == 16
    assert last.step_seconds > 0
    assert last.items_per_second is None
    assert progress.statuses[1].seconds_left > 0


def test_throughput_and_utilization(world):
    writer = ListWriter()
    options = LoopOptions(num_steps=3, log_every=1, items_per_step=50, peak_flops=1e6)
    result = Trainer(
        step=FakeStep(world), batches=itertools.count(), options=options, writers=[writer]
    ).fit()
    assert result.items_per_second == pytest.approx(50 * 2 / result.train_seconds)
    row = writer.rows[-1][1]
    speed = row["time/tokens_per_second"]
    assert speed == pytest.approx(50 / row["time/step_seconds"])
    # 6 x 3 parameters x tokens per second, on 8 devices with 1e6 FLOP/s each.
    assert row["time/model_flops_utilization"] == pytest.approx(18 * speed / 8e6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, r"got num_steps=0, .* at least 1"),
        ({"num_steps": 1, "log_every": 0}, r"log_every=0, .* at least 1"),
        ({"num_steps": 1, "eval_every": -1}, r"eval_every=-1, .* at least 0"),
        ({"num_steps": 1, "save_every": -1}, r"save_every=-1, .* at least 0"),
        ({"num_steps": 1, "peak_flops": 1.0}, r"got items_per_step=None, .* set items_per_step"),
        (
            {"num_steps": 1, "peak_flops": 1.0, "items_per_step": 256, "item": "images"},
            r"got items_per_step=256, item='images'; .* item='tokens', or leave peak_flops out",
        ),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ConfigError, match=message):
        LoopOptions(**options)


@pytest.mark.parametrize(
    ("option", "name", "function"),
    [
        ("save_every", "save", lambda state, number, loss: None),
        ("eval_every", "validation", lambda: [0]),
    ],
)
def test_a_period_needs_its_function(world, option, name, function):
    message = rf"{option}=2, but the trainer has no {name} function; give it one, or leave {option}"
    with pytest.raises(ConfigError, match=message):
        fit(FakeStep(world), 3, **{option: 2})
    assert fit(FakeStep(world), 3, **{option: 2, name: function}).is_finished
    assert fit(FakeStep(world), 3).is_finished


def test_values_read_by_should_stop(world):
    records, writer = [], ListWriter()
    options = LoopOptions(num_steps=9, log_every=2, items_per_step=50, peak_flops=1e6)
    Trainer(
        step=FakeStep(world), batches=itertools.count(), options=options, writers=[writer],
        should_stop=records.append,
    ).fit()  # fmt: skip
    assert records[0].keys() == {
        "train/loss", "time/step_seconds", "time/tokens_per_second",
        "time/model_flops_utilization", "time/slowest_step_seconds", "time/data_share",
        "time/host_share", "time/goodput", "time/elapsed_seconds", "time/unix",
    }  # fmt: skip
    rows = [row for _, row in writer.rows]
    assert all(record in rows for record in records)


def test_should_stop_reads_validations_too(world):
    has_seen = lambda record: record.get("validation/loss", 0) >= 400
    result = fit(FakeStep(world), 9, eval_every=2, validation=lambda: [0], should_stop=has_seen)
    assert (result.reason, result.num_steps) == ("should_stop", 4)


def test_a_run_that_ends_early_copies_its_last_state(world):
    copies = []
    copy = lambda state, number: copies.append(number)
    for batches in (range(3), itertools.count()):
        fit(FakeStep(world), 5, batches=batches, copy=copy)
    assert copies == [3]


def test_should_stop_waits_for_metrics_of_training(world):
    records = []
    fit(
        FakeStep(world), 9, log_every=4, eval_every=2, validation=lambda: [0],
        should_stop=lambda record: records.append(dict(record)),
    )  # fmt: skip
    assert [record["train/loss"] for record in records[:2]] == [2.5, 2.5]
    assert [record["validation/loss"] for record in records[:4]] == [400, 400, 600, 600]


def test_should_stop_waits_for_metrics_of_training_after_a_validation_was_made_up(world):
    records = []
    fit(
        FakeStep(world, losses=[1.0, 3.0, 5.0]), 5, log_every=2, eval_every=2,
        validation=lambda: [0], state=FakeState(jnp.int32(2), {"w": jnp.ones(3)}),
        history=[{"step": 2, "train/loss": 1.0}],
        should_stop=lambda record: records.append(record["train/loss"]),
    )  # fmt: skip
    assert records == [2.0]


class Curved(FakeStep):
    """Validations of two sets, whose losses are defined here."""

    def __init__(self, world, losses):
        super().__init__(world)
        self.own = losses

    def evaluate_sums(self, state, batch, *, ema=False):
        value = self.own[int(state.step) - 1] * (1 if batch == 0 else -1)
        return {"loss": Weighted(jnp.float32(value), jnp.float32(1))}


@pytest.mark.parametrize(
    ("options", "last", "scores"),
    [
        ({"patience": 2}, 4, [5, 3, 3, 4]),
        ({"patience": 2, "min_delta": 3.0}, 3, [5, 3, 3]),
        ({"patience": 2, "best_metric": "validation/code/loss", "best_mode": "max"}, 4,
         [5, 3, 3, 4]),
        ({"patience": 0}, 6, [5, 3, 3, 4, 6, 1]),
    ],
)  # fmt: skip
def test_a_run_ends_early_and_is_best_by_any_metric_of_any_set(world, options, last, scores):
    saved, writer, notes = [], ListWriter(), NotingProgress()
    result = Trainer(
        step=Curved(world, [5, 3, 3, 4, 6, 1]), batches=itertools.count(), writers=[writer],
        options=LoopOptions(num_steps=6, eval_every=1, save_every=1, **options), progress=notes,
        validation={"": lambda: [0], "code": lambda: [1]},
        save=lambda state, number, score: saved.append((number, score)),
    ).fit()  # fmt: skip
    assert result.reason == ("early stopping" if last < 6 else "finished")
    assert saved == list(enumerate(map(float, scores), 1))
    assert writer.curve("validation/code/loss") == [(n, -float(x)) for n, x in enumerate(scores, 1)]
    assert bool(notes.notes) == (last < 6)
    assert not notes.notes or "was best 2 validations ago: stopping early" in notes.notes[0]


def test_a_best_metric_that_no_validation_has(world):
    saved = []
    with pytest.raises(ConfigError, match=r"no metric 'los'. Did you mean 'loss'\?"):
        Trainer(
            step=FakeStep(world), batches=itertools.count(), validation=lambda: [0],
            options=LoopOptions(num_steps=2, best_metric="validation/los"),
            save=lambda state, number, score: saved.append((int(state.step), number, score)),
        ).fit()  # fmt: skip
    assert saved == [(2, 2, None)]


@pytest.mark.parametrize(("eval_every", "failing", "steps"), [(0, 1, 5), (2, 2, 4), (4, 1, 4)])
def test_the_state_before_a_validation_that_fails_is_saved(world, eval_every, failing, steps):
    made, saved = [], []

    def validation():
        made.append(1)
        if len(made) == failing:
            raise OSError("the disk is gone")
        return [0]

    with pytest.raises(OSError, match="the disk is gone"):
        fit(
            FakeStep(world), 5, eval_every=eval_every, validation=validation,
            save=lambda state, number, score: saved.append((int(state.step), number, score)),
        )  # fmt: skip
    assert saved == [(steps, steps, None)]


def test_the_error_of_a_validation_is_told_even_if_the_state_cannot_be_saved(world):
    def broken(*given):
        raise RuntimeError(given[0])

    notes = NotingProgress()
    with pytest.raises(OSError, match="the disk is gone"):
        fit(
            FakeStep(world), 2, progress=notes,
            validation=lambda: (_ for _ in ()).throw(OSError("the disk is gone")),
            save=lambda state, number, score: broken("no space"),
        )  # fmt: skip
    assert notes.notes == ["the state of step 2 is not saved: no space"]


@pytest.mark.parametrize("saves", [True, False])
def test_the_error_of_a_validation_is_told_before_the_wait_for_other_processes(world, saves):
    """Without a place to save there is nothing to wait for."""
    waits = []

    def agree(world, topic, facts, timeout):
        waits.append((topic, [str(each.message) for each in told]))

    def validation():
        warnings.simplefilter("always")
        patch.setattr(World, "num_processes", 2)
        patch.setattr(trainer, "agree", agree)
        raise OSError("the disk is gone")

    save = (lambda state, number, score: None) if saves else None
    with (
        warnings.catch_warnings(record=True) as told,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        fit(FakeStep(world), 2, validation=validation, save=save)
    assert len(waits) == len(told) == int(saves)
    for topic, texts in waits:
        assert topic == "failed validation after step 2"
        assert "failed on process 0, which waits up to 30 s" in texts[0]
        assert texts[0].endswith("OSError: the disk is gone")


def test_a_validation_that_is_not_finite_has_no_score(world):
    saved = []
    values = [math.inf, 3.0, -math.inf, math.nan, 4.0, 5.0]
    result = Trainer(
        step=Curved(world, values), batches=itertools.count(), validation=lambda: [0],
        options=LoopOptions(num_steps=6, eval_every=1, save_every=1, patience=3),
        save=lambda state, number, score: saved.append((number, score)),
    ).fit()  # fmt: skip
    assert saved == [(1, None), (2, 3.0), (3, None), (4, None), (5, 4.0)]
    # -inf is no improvement on 3, which is best until the run ends.
    assert result.reason == "early stopping"


def test_a_signal_traces_the_next_steps(world, tmp_path):
    hook = lambda number: number == 3 and signal.raise_signal(signal.SIGUSR1)
    notes, options = NotingProgress(), LoopOptions(num_steps=8, profile_steps=2)
    Trainer(
        step=FakeStep(world, before=hook), batches=itertools.count(), options=options,
        progress=notes, profile_dir=str(tmp_path),
    ).fit()  # fmt: skip
    assert notes.notes == [f"traced steps 4 to 5 into {tmp_path}"]
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_spikes_are_counted_and_told_and_in_no_mean(world):
    class Spiking(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            return state, metrics | {"spike": jnp.float32(self.taken == 3)}

    writer, notes = ListWriter(), NotingProgress()
    result = Trainer(
        step=Spiking(world), batches=itertools.count(), writers=[writer], progress=notes,
        options=LoopOptions(num_steps=4, log_every=2),
    ).fit()  # fmt: skip
    assert result.skipped_steps == 1
    assert writer.curve("train/loss") == [(2, 1.5), (4, 4.0)]
    assert writer.curve("train/skipped_steps") == [(2, 0.0), (4, 1.0)]
    assert notes.notes == [
        "1 step skipped, 1 so far; step 3: the loss 3 or its gradient is a spike"
    ]


def test_batches_of_steps_that_a_rollback_undid_stay_used(world):
    writer, drawn = ListWriter(), []
    step = FakeStep(world, losses=[1.0, 2.0, 3.0, math.nan, *[5.0] * 5])
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    result = Trainer(
        step=step, batches=(drawn.append(n) or n for n in itertools.count()), writers=[writer],
        options=LoopOptions(num_steps=5, log_every=1),
        go_back=lambda: FakeState(jnp.int32(2), {"w": jnp.ones(3)}),
        data_facts=lambda batches: {"seen/batches": float(batches)},
    ).fit()  # fmt: skip
    assert (result.rollbacks, result.num_steps) == (1, 5)
    # Step 4 is read after step 5 was taken, so five batches are used when the run goes back.
    assert len(drawn) == step.taken == 5 + 3
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (3, 6.0), (4, 7.0), (5, 8.0)]
    assert writer.curve("seen/batches") == expected


def test_going_back_restores_the_counts_of_skipped_steps_and_of_updates(world):
    class Spiking(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            return state, metrics | {"spike": jnp.float32(self.taken in (2, 4, 7))}

    writer, notes = ListWriter(), NotingProgress()
    step = Spiking(world, losses=[1.0, 2.0, 3.0, 4.0, math.nan, *[5.0] * 9])
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    trainer = Trainer(
        step=step, batches=itertools.count(), writers=[writer], progress=notes,
        options=LoopOptions(num_steps=6, log_every=1),
        go_back=lambda: FakeState(jnp.int32(3), {"w": jnp.ones(3)}),
        facts=lambda step, updates: {"updates": float(updates)},
    )  # fmt: skip
    # Of the steps 4 to 6 after step 3, which are taken 7th to 9th, one is a spike.
    assert trainer.fit().skipped_steps == 2
    counts = [(1, 0), (2, 1), (3, 1), (4, 2), (4, 2), (5, 2), (6, 2)]
    assert writer.curve("train/skipped_steps") == counts
    assert writer.curve("updates") == [(1, 1), (3, 2), (5, 3), (6, 4)]
    assert [note.partition(",")[0] for note in notes.notes if "skipped" in note] == [
        "1 step skipped"
    ] * 3

    # A later call finds the counts of the steps that were not undone.
    kept = [{"step": number, **row} for number, row in writer.rows if number <= 3]
    history = [*kept, *({"step": n, **row} for n, row in writer.rows[-3:])]
    resumed = Trainer(
        step=FakeStep(world), batches=itertools.count(), writers=[writer], history=history,
        options=LoopOptions(num_steps=7, log_every=1), facts=trainer.facts,
    ).fit(FakeState(jnp.int32(6), {"w": jnp.ones(3)}))  # fmt: skip
    assert (resumed.skipped_steps, writer.curve("updates")[-1]) == (2, (7, 5.0))


def test_steps_whose_gradients_overflow_are_no_updates(world):
    class Overflowing(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            is_spike, overflows = self.taken == 3, self.taken in (1, 3, 4)
            flags = {"spike": jnp.float32(is_spike), "gradient_overflow": jnp.bool(overflows)}
            return state, metrics | flags

    writer = ListWriter()
    result = Trainer(
        step=Overflowing(world), batches=itertools.count(), writers=[writer],
        options=LoopOptions(num_steps=5, log_every=1),
        facts=lambda step, updates: {"updates": float(updates)},
    ).fit()  # fmt: skip
    # A step that is skipped for two reasons is counted once.
    assert writer.curve("updates") == [(1, 0.0), (2, 1.0), (4, 1.0), (5, 2.0)]
    assert writer.curve("train/overflowed_steps") == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert result.skipped_steps == 1
    # The losses of steps that overflowed are in the means; the flags are not.
    assert writer.curve("train/loss") == [(1, 1.0), (2, 2.0), (4, 4.0), (5, 5.0)]
    assert writer.curve("train/gradient_overflow") == []
    assert set(result.metric_curves) == set()


def test_counts_are_those_of_the_saved_state_and_not_of_the_last_record(world):
    class Spiking(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            number = int(state.step)
            flags = {"spike": number == 3, "gradient_overflow": number == 4}
            return state, metrics | {name: jnp.float32(is_on) for name, is_on in flags.items()}

    def call(state=None, **kwargs):
        writer = ListWriter()
        trainer = Trainer(
            step=Spiking(world), batches=itertools.count(), writers=[writer],
            facts=lambda step, updates: {"updates": float(updates)}, **kwargs,
        )  # fmt: skip
        return trainer.fit(state), writer

    saved, counts = {}, {}
    result, whole = call(
        options=LoopOptions(num_steps=9, log_every=9, save_every=5, copy_every=2),
        on_counts=counts.update,
        save=lambda state, number, score: saved.update({("save", number): dict(counts)}),
        copy=lambda state, number: saved.update({("copy", number): dict(counts)}),
    )
    without_sums = lambda one: {n: x for n, x in one.items() if not n.startswith("window_")}
    none = {"skipped_steps": 0, "overflowed_steps": 0}
    both = {"skipped_steps": 1, "overflowed_steps": 1}
    assert without_sums(saved["copy", 2]) == none
    assert without_sums(saved["save", 5]) == without_sums(saved["copy", 4]) == both
    # No record was written up to step 5.
    resumed, rest = call(
        FakeState(jnp.int32(5), {"w": jnp.ones(3)}),
        options=LoopOptions(num_steps=9, log_every=9),
        counts=saved["save", 5],
    )
    assert resumed.skipped_steps == result.skipped_steps == 1
    for name in ("train/skipped_steps", "train/overflowed_steps", "updates"):
        assert rest.curve(name) == whole.curve(name)


class Resumable(FakeStep):
    """The loss follows from the step, and a state of any step can go on."""

    def __call__(self, state, batch, was_nonfinite=None):
        state, _ = super().__call__(state, batch)
        return state, {"loss": jnp.float32(0.1 * int(state.step) ** 2)}


@pytest.mark.parametrize("at", [3, 5, 6])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_resumed_record_is_the_mean_over_the_same_steps(world, at, is_killed):
    def call(state=None, counts=None, before=lambda number: None):
        saved, writer = {}, ListWriter()
        trainer = Trainer(
            step=Resumable(world, before=before), batches=itertools.count(), writers=[writer],
            options=LoopOptions(num_steps=12, log_every=5, save_every=at if is_killed else 0),
            counts=counts or {}, on_counts=lambda given: saved.update({"counts": dict(given)}),
            save=lambda state, number, score: saved.setdefault(number, saved["counts"]),
        )  # fmt: skip
        result = trainer.fit(state)
        return result, saved, writer.curve("train/loss")

    raising = lambda number: number == at and signal.raise_signal(signal.SIGTERM)
    _, _, whole = call()
    first, saved, before = call(before=(lambda number: None) if is_killed else raising)
    assert is_killed or first.num_steps == at
    counts = json.loads(json.dumps(saved[at]))
    _, _, rest = call(FakeState(jnp.int32(at), {"w": jnp.ones(3)}), counts)
    assert [number for number, _ in whole] == [5, 10, 12]
    # A record that the signal cut short is one more.
    assert is_killed or at == 5 or before[-1][0] == at
    assert [row for row in before if row[0] % 5 == 0 and row[0] <= at] + rest == whole


@pytest.mark.parametrize(
    ("log_every", "counts", "expected"),
    [
        # The loss of the steps 1 to 3 is 1, then 2.
        (4, {"window_steps": 3, "window_sum/loss": 3.0}, 1.25),
        (4, {}, 2.0),
        (4, {"skipped_steps": 0, "overflowed_steps": 0}, 2.0),
        # The run had more steps in a record, or other metrics.
        (2, {"window_steps": 3, "window_sum/loss": 3.0}, 2.0),
        (4, {"window_steps": 3, "window_sum/loss": 3.0, "window_sum/accuracy": 1.0}, 2.0),
        # It had a record of step 2.
        (4, {"window_steps": 1, "window_sum/loss": 1.0}, 1.5),
    ],
)
def test_saved_sums_that_fit_the_next_record_are_in_its_mean(world, log_every, counts, expected):
    writer = ListWriter()
    fit(
        FakeStep(world, losses=[2.0]), 4, log_every=log_every, writers=[writer], counts=counts,
        state=FakeState(jnp.int32(3), {"w": jnp.ones(3)}),
    )  # fmt: skip
    assert writer.curve("train/loss") == [(4, expected)]


def test_after_a_rollback_a_record_is_the_mean_over_all_its_steps(world):
    writer = ListWriter()
    step = FakeStep(world, losses=[1.0, 1.0, 1.0, math.nan, 2.0, 3.0, 5.0, 6.0])
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    saved = {}
    result = fit(
        step, 5, log_every=5, save_every=3, writers=[writer], on_counts=saved.update,
        save=lambda state, number, score: saved.setdefault("first", dict(saved)),
        go_back=lambda: FakeState(jnp.int32(3), {"w": jnp.ones(3)}),
        earlier_counts=lambda: saved["first"],
    )  # fmt: skip
    assert result.rollbacks == 1
    # The steps 4 and 5 after the rollback are the last that were taken.
    losses = [1.0, 1.0, 1.0, *step.losses[step.taken - 2 : step.taken]]
    assert writer.curve("train/loss") == [(5, sum(losses) / 5)]


def test_going_back_before_the_start_takes_the_counts_that_were_saved(world):
    """The run resumes from a copy after step 13; its checkpoint is that of step 10."""
    step = FakeStep(world, losses=[1.0, math.nan, *[1.0] * 9])
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    history = [{"step": 9, "train/loss": 1.0, "train/skipped_steps": 1.0}]
    result = Trainer(
        step=step, batches=itertools.count(), history=history,
        options=LoopOptions(num_steps=16, log_every=1),
        counts={"skipped_steps": 3, "overflowed_steps": 0},
        go_back=lambda: FakeState(jnp.int32(10), {"w": jnp.ones(3)}),
        earlier_counts=lambda: {"skipped_steps": 2, "overflowed_steps": 0},
    ).fit(FakeState(jnp.int32(13), {"w": jnp.ones(3)}))  # fmt: skip
    assert (result.rollbacks, result.skipped_steps) == (1, 2)


def test_nothing_of_undone_steps_stops_a_run(world):
    step = FakeStep(world, losses=[1.0] * 12 + [math.nan] + [2.0] * 40)
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    notes, seen, went_back = NotingProgress(), [], []

    def go_back():
        went_back.append(len(seen))
        return FakeState(jnp.int32(7), {"w": jnp.ones(3)})

    result = Trainer(
        step=step, batches=itertools.count(), progress=notes,
        options=LoopOptions(num_steps=16, log_every=1, eval_every=6, save_every=1),
        validation=lambda: [1, 2],
        save=lambda state, number, score: None,
        go_back=go_back,
        should_stop=lambda record: seen.append(dict(record)),
    ).fit()  # fmt: skip
    assert (result.rollbacks, result.num_steps) == (1, 16)
    # The newest validation that was not undone is that of step 6; its loss grows with the step. The
    # record is that of step 8, after the first batch that followed.
    undone = went_back[0]
    assert seen[undone - 1]["validation/loss"] == 1201.5
    assert seen[undone]["validation/loss"] == 601.5
    assert seen[undone]["train/loss"] == 2.0
    assert notes.phases.count("compiling the validation") == 1


def test_facts_may_be_scalars_of_any_library(world, tmp_path):
    schedule = optax.constant_schedule(jnp.float32(0.5))
    writer = JsonlWriter(tmp_path / "m.jsonl")
    fit(
        FakeStep(world), 2, log_every=2, writers=[writer],
        facts=lambda step, updates: {"rate": schedule(updates), "n": np.float32(updates)},
        data_facts=lambda batches: {"seen": np.int64(batches)},
    )  # fmt: skip
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert (row["rate"], row["n"], row["seen"]) == (0.5, 2.0, 2.0)


def test_a_spike_of_one_of_many_replicas_skips_no_step(world):
    class Spiking(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            return state, metrics | {"spike": jnp.float32(0.25 if self.taken == 2 else 0)}

    result = fit(Spiking(world), 3)
    assert result.skipped_steps == 0
    assert len(result.train_curve) == 3


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_skipping_spikes_does_not_change_what_happens_to_nonfinite_steps(world, policy):
    class Spiking(FakeStep):
        def __call__(self, state, batch, was_nonfinite=None):
            state, metrics = super().__call__(state, batch)
            return state, metrics | {"spike": jnp.float32(0)}

    step = Spiking(world, losses=[1.0, 2.0, math.nan, 4.0])
    step.options = StepOptions(nonfinite=Nonfinite(policy))
    if policy == "stop":
        with pytest.raises(NonfiniteError, match="step 3: the loss is nan; the state is that of"):
            fit(step, 4)
    else:
        assert fit(step, 4).skipped_steps == 1


@pytest.mark.parametrize("number", [4, 9])
def test_a_run_that_goes_back_to_its_last_step_or_a_later_one_ends(world, number):
    step = FakeStep(world, losses=[1.0, 2.0, math.nan, 4.0, 5.0])
    step.options = StepOptions(nonfinite=Nonfinite.ROLLBACK)
    later = FakeState(jnp.int32(number), {"w": jnp.ones(3)})
    result = fit(step, 4, go_back=lambda: later)
    assert (result.reason, result.num_steps, int(result.state.step)) == ("finished", number, number)


@pytest.mark.parametrize(
    ("start", "is_saved", "saved"),
    [
        (4, None, []),
        (4, [4], []),
        (4, [], [4]),
        (4, [6], [4]),
        (0, [], []),
    ],
)
def test_a_state_that_only_memory_has_is_saved_before_a_run_stops(world, start, is_saved, saved):
    step = FakeStep(world, losses=[math.nan, 2.0, 3.0])
    step.options = StepOptions(nonfinite=Nonfinite.STOP)
    seen = []
    with pytest.raises(NonfiniteError, match=f"step {start + 1}: the loss is nan"):
        fit(
            step, 8, state=FakeState(jnp.int32(start), {"w": jnp.ones(3)}),
            save=lambda state, number, score: seen.append(number),
            is_saved=None if is_saved is None else is_saved.__contains__,
        )  # fmt: skip
    assert seen == saved


def test_a_save_that_failed_is_made_again_before_a_run_stops(world):
    step = FakeStep(world, losses=[1.0, 2.0, math.nan, 4.0, 5.0])
    step.options = StepOptions(nonfinite=Nonfinite.STOP)
    seen = []
    with pytest.raises(NonfiniteError):
        fit(
            step, 8, save_every=2, is_saved=lambda number: False,
            save=lambda state, number, score: seen.append(number),
        )  # fmt: skip
    assert seen == [2, 2]


def test_nothing_to_do(world):
    with pytest.raises(ConfigError, match="there is no batch to train on; give the trainer"):
        fit(FakeStep(world), 1, batches=[])
    with pytest.raises(ConfigError, match="has taken 3 steps, but the run ends at step 3; raise"):
        fit(FakeStep(world), 3, state=FakeState(jnp.int32(3), {}))
    with pytest.raises(ConfigError, match="validation gave no batch; give at least one"):
        fit(FakeStep(world), 1, validation=list)


def test_works_on_any_world():
    assert fit(FakeStep(World.emulate(2)), 2).reason == "finished"
