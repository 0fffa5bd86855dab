import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError, DivisibilityError
from axon_dist.data import Text, TextLoader

LENGTH = 4
NUM_SAMPLES = 10
TEXT = Text(
    train=np.arange(NUM_SAMPLES * LENGTH + 1, dtype=np.uint16),
    validation=np.arange(1000, 1060, dtype=np.uint16),
    vocab_size=2000,
    description="numbers",
)


def loader(global_batch=4, **fields):
    return TextLoader(TEXT, length=LENGTH, **{"global_batch": global_batch, **fields})


def samples_of(batches):
    """Returns the window of each row, since token values are positions."""
    return [int(row[0]) // LENGTH for batch in batches for row in batch["tokens"]]


def run(one, num_batches):
    return samples_of(itertools.islice(one, num_batches))


def run_on(num_processes, num_batches, state=None, **fields):
    """Returns the global order of samples, from the batches of every process."""
    loaders = [
        loader(process=p, num_processes=num_processes, **fields) for p in range(num_processes)
    ]
    if state is not None:
        for one in loaders:
            one.restore(state)
    steps = [[next(one) for one in loaders] for _ in range(num_batches)]
    assert len({json.dumps(one.state()) for one in loaders}) == 1
    return samples_of(itertools.chain.from_iterable(steps)), loaders[0].state()


ORDER = run(loader(global_batch=1), 60)


def test_rows_are_windows_of_the_text():
    batch = next(loader())
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].shape == (4, LENGTH + 1)
    starts = batch["tokens"][:, :1]
    np.testing.assert_array_equal(batch["tokens"], starts + np.arange(LENGTH + 1))
    assert np.all(starts % LENGTH == 0)


def test_epochs_hold_every_window_once_in_another_order():
    epochs = [ORDER[i : i + NUM_SAMPLES] for i in range(0, 60, NUM_SAMPLES)]
    assert all(sorted(epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_seeds_have_orders_of_their_own():
    assert run(loader(seed=1), 5) != run(loader(seed=0), 5)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_global_order_does_not_know_the_number_of_processes(rows, num_processes, num_batches):
    batch = rows * num_processes
    order, state = run_on(num_processes, num_batches, global_batch=batch)
    assert order == ORDER[: batch * num_batches]
    assert state["samples_seen"] == batch * num_batches


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_sample_is_in_one_microbatch_for_any_number_of_processes(count):
    """The parts of all processes, concatenated, are a microbatch in its placed order."""
    fields = {"global_batch": 12, "num_microbatches": 3, "num_processes": count}
    rows = [run(loader(process=process, **fields), 1) for process in range(count)]
    cut = np.concatenate([np.reshape(own, (3, -1)) for own in rows], axis=1)
    assert cut.reshape(-1).tolist() == ORDER[:12]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_replica_has_consecutive_rows_for_any_number_of_processes(count, num_replicas):
    each = 24 // num_replicas
    fields = {"global_batch": 24, "num_microbatches": 2, "num_processes": count}
    fields["num_replicas"] = num_replicas
    own = [run(loader(process=process, **fields), 1) for process in range(count)]
    together = np.concatenate(own).tolist()
    assert sorted(together) == sorted(ORDER[:24])
    if num_replicas % count == 0:
        assert together == ORDER[:24]
    if count % num_replicas == 0:
        rows = np.reshape(own, (num_replicas, count // num_replicas, 2, -1))
        assert rows.swapaxes(1, 2).reshape(-1).tolist() == ORDER[:24]
    first = 24 // count
    assert set(own[0]) <= set(ORDER[: -(-first // each) * each])


def test_a_process_may_have_parts_that_are_not_consecutive():
    fields = {"global_batch": 16, "num_microbatches": 2}
    parts = [(0, 2), (1, 3)]
    rows = [run(loader(share=(own, 4), **fields), 1) for own in parts]
    cut = np.empty((2, 4, 2), int)
    for own, numbers in zip(parts, rows, strict=True):
        cut[:, own] = np.reshape(numbers, (2, 2, 2))
    assert cut.reshape(-1).tolist() == ORDER[:16]
    batches = [next(loader(share=(own, 4), **fields).validation_batches(1)) for own in parts]
    whole = next(loader(**fields).validation_batches(1))["tokens"].reshape(4, 4, -1)
    for own, batch in zip(parts, batches, strict=True):
        np.testing.assert_array_equal(batch["tokens"], np.concatenate(whole[list(own)]))


def test_a_batch_divides_by_its_microbatches():
    with pytest.raises(DivisibilityError, match=r"4 rows .* 3 microbatches; use 3 or 6 rows"):
        loader(num_microbatches=3)
    with pytest.raises(DivisibilityError, match=r"4 rows .* 3 replicas of 2 microbatches; use 6 "):
        loader(num_microbatches=2, num_replicas=3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_resuming_repeats_none_and_skips_none(num_batches, before, after):
    first, state = run_on(before, num_batches, global_batch=4)
    rest, _ = run_on(after, 3, json.loads(json.dumps(state)), global_batch=6)
    assert first + rest == ORDER[: 4 * num_batches + 18]


def test_prefetched_batches_are_not_counted():
    for num_ahead in (0, 1, 5):
        one = loader(num_ahead=num_ahead)
        assert run(one, 3) == ORDER[:12]
        assert one.state()["samples_seen"] == 12
        one.restore({**one.state(), "samples_seen": 2})
        assert run(one, 2) == ORDER[2:10]


@pytest.mark.full
def test_a_script_that_ends_within_its_data_prints_nothing():
    program = """
from axon_dist.data import Loader, Sequences
rows = [{"x": [1.0]}] * 8
batches = Loader(Sequences(rows, rows, "ones"), global_batch=4)
next(batches)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_workers_of_a_script_without_a_guard_say_so(tmp_path):
    program = """
from axon_dist.data import Loader, Sequences
rows = [{"x": [1.0]}] * 8
next(Loader(Sequences(rows, rows, "ones"), global_batch=4, num_workers=1, num_ahead=0))
"""
    (tmp_path / "script.py").write_text(program)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    *_, last = done.stderr.strip().splitlines()
    assert "a data worker ended with exit code 1; it printed its error above" in last
    assert 'under `if __name__ == "__main__":`' in last
    assert "memory" not in last


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_validation_batches_are_the_same_every_time(num_processes):
    def rows(one):
        return [batch["tokens"] for batch in one.validation_batches(3)]

    parts = [rows(loader(process=p, num_processes=num_processes)) for p in range(num_processes)]
    whole = np.stack([np.concatenate(step) for step in zip(*parts, strict=True)])
    np.testing.assert_array_equal(whole, rows(loader()))
    np.testing.assert_array_equal(whole, rows(loader(seed=3)))
    assert whole.shape == (3, 4, LENGTH + 1)
    assert whole[0, 0, 0] == 1000
    assert whole[-1, -1, -1] == 1059


def test_validation_leaves_the_position_alone():
    one = loader()
    first = run(one, 1)
    list(one.validation_batches(2))
    assert first + run(one, 2) == ORDER[:12]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"global_batch": 5, "num_processes": 2}, DivisibilityError, r"5 rows .* 2 processes.*4"),
        ({"length": 0}, ConfigError, r"length=0 must be at least 1; change it"),
        ({"num_ahead": -1}, ConfigError, r"num_ahead=-1 must be at least 0; change it"),
        ({"length": 59}, ConfigError, r"training text has 41 tokens, .*60: give more text"),
        ({"length": 40}, None, None),
    ],
)
def test_bad_settings_are_refused(fields, error, message):
    settings = {"length": LENGTH, "global_batch": 4, **fields}
    if error is None:
        assert TextLoader(TEXT, **settings).num_samples == 1
        return
    with pytest.raises(error, match=message):
        TextLoader(TEXT, **settings)


def test_a_short_validation_text_is_refused():
    text = Text(TEXT.train, TEXT.validation[:4], 2000, "numbers")
    with pytest.raises(ConfigError, match=r"validation text has 4 tokens, .*of 5: give more text"):
        TextLoader(text, length=LENGTH, global_batch=1)


def test_no_validation_batches_is_refused():
    with pytest.raises(ConfigError, match=r"0 validation batches must be at least 1; raise it"):
        loader().validation_batches(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, r"seed=7, but this loader has seed=0: .*same data, length and seed"),
        ({"num_samples": 11}, r"num_samples=11, but this loader has num_samples=10"),
        ({"length": 8}, r"length=8, but this loader has length=4"),
        ({"samples_seen": -4}, r"samples_seen=-4, which must be 0 or more"),
        ({"samples_seen": 10**30}, r"samples_seen=10{30}, which must be .* less than"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    one = loader()
    with pytest.raises(ConfigError, match=message):
        one.restore({**one.state(), **change})


def test_something_else_than_a_state_is_refused():
    with pytest.raises(ConfigError, match=r"has no 'samples_seen': give what state\(\) returned"):
        loader().restore({"next_index": 3})
