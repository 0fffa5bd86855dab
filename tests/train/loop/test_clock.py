import itertools

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.train.loop import LoopOptions, Trainer
from axon_dist.train.loop.meters import StepProfile
from axon_dist.train.loop.record import COMPILE, DATA, LOST, SAVE, TimeSheet

from .test_trainer import FakeStep, ListWriter


def test_every_second_is_in_one_kind():
    sheet = TimeSheet(iter([0.0, 100.0]).__next__)
    for kind, seconds in {COMPILE: 30.0, DATA: 5.0, SAVE: 10.0, LOST: 7.0}.items():
        sheet.add(kind, seconds)
    found = sheet.by_kind(train_seconds=50.0)
    assert found["step"] == 50 - 5 - 7
    assert found["other"] == 100 - 30 - 10 - 50
    assert sum(found.values()) == 100


def slow(batches, seconds):
    import time

    for batch in batches:
        time.sleep(seconds)
        yield batch


def test_waiting_for_data_and_saving_are_distinguished(world):
    import time

    writer = ListWriter()
    options = LoopOptions(num_steps=8, log_every=4, save_every=4)
    start = time.perf_counter()
    result = Trainer(
        step=FakeStep(world), batches=slow(itertools.count(), 0.02), options=options,
        writers=[writer], save=lambda *_: time.sleep(0.3),
    ).fit()  # fmt: skip
    elapsed = time.perf_counter() - start
    assert result.seconds["data"] >= 7 * 0.02
    assert result.seconds["save"] >= 0.6
    # Nothing is counted twice: saves do not count as training.
    assert result.train_seconds + result.seconds["save"] <= elapsed
    assert sum(result.seconds.values()) <= elapsed + 1e-3
    row = writer.rows[-1][1]
    assert 0 < row["time/data_share"] <= 1
    assert 0 <= row["time/goodput"] < 1
    assert row["time/slowest_step_seconds"] > 0
    assert set(result.step_percentiles) == {50, 90, 99, 100}


def test_the_first_batch_that_is_validated_is_compiled_for(world):
    import time

    class Slow(FakeStep):
        def evaluate_sums(self, state, batch, *, ema=False):
            time.sleep(0.2 * (not hasattr(self, "compiled")))
            self.compiled = True
            return super().evaluate_sums(state, batch, ema=ema)

    result = Trainer(
        step=Slow(world), batches=itertools.count(), validation=lambda: range(3),
        options=LoopOptions(num_steps=4, eval_every=2),
    ).fit()  # fmt: skip
    assert result.seconds["compile"] == result.compile_seconds >= 0.2
    assert 0 < result.seconds["validation"] < 0.2


def test_facts_of_a_step_are_in_its_record(world):
    writer = ListWriter()
    Trainer(
        step=FakeStep(world), batches=itertools.count(), writers=[writer],
        options=LoopOptions(num_steps=3, log_every=1),
        facts=lambda step, updates: {"seen/tokens": 10.0 * step},
    ).fit()  # fmt: skip
    assert [row["seen/tokens"] for _, row in writer.rows] == [10.0, 20.0, 30.0]


def test_the_steps_that_are_traced(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profile = StepProfile(3, 2, tmp_path)
    for number in range(1, 7):
        with profile.around(number, lambda: None):
            calls.append(number)
    assert calls == [1, 2, "start", 3, 4, "stop", 5, 6]
    profile.close()
    assert calls[-1] == 6


def test_a_run_that_ends_early_closes_its_trace(monkeypatch, tmp_path, world):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append(folder))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    options = LoopOptions(num_steps=9, profile_at=3, profile_steps=100)
    Trainer(
        step=FakeStep(world), batches=range(5), options=options, profile_dir=str(tmp_path)
    ).fit()
    assert calls == [str(tmp_path), "stop"]


def test_a_trace_that_was_cut_short_says_which_steps_it_has(monkeypatch, tmp_path):
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    told = []
    # The first step of a process is not traced, and the run ends after step 4.
    profile = StepProfile(1, 9, tmp_path)
    with profile.on_signal(told.append):
        for number in (2, 3, 4):
            with profile.around(number, lambda: None):
                pass
        profile.close()
    assert told == [f"traced steps 2 to 4 into {tmp_path}"]


def test_impossible_profiles():
    with pytest.raises(ConfigError, match="got profile_steps=0, an int; give a whole number"):
        LoopOptions(num_steps=1, profile_at=1, profile_steps=0).validate()
    with pytest.raises(ConfigError, match="trace nothing, because the first step of a process"):
        LoopOptions(num_steps=9, profile_at=1, profile_steps=1)
    LoopOptions(num_steps=9, profile_at=1, profile_steps=2)
