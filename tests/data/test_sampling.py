import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.batch_rows import rows_of_parts
from axon_dist.core.errors import ConfigError, DivisibilityError
from axon_dist.data import local_rows, num_windows, shuffled, spread_starts, windows_at


@given(st.integers(0, 200), st.integers(1, 20))
def test_windows_predict_every_token_but_the_first_once(num_tokens, length):
    stream = np.arange(num_tokens)
    starts = np.arange(num_windows(num_tokens, length)) * length
    targets = windows_at(stream, starts, length)[:, 1:].ravel()
    np.testing.assert_array_equal(targets, np.arange(1, len(starts) * length + 1))
    assert num_tokens - len(targets) <= length or num_tokens == 0


def test_windows_are_int32_whatever_the_stream_is_stored_as():
    stream = np.arange(9, dtype=np.uint8)
    windows = windows_at(stream, np.array([0, 4]), 4)
    assert windows.dtype == np.int32
    np.testing.assert_array_equal(windows, [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])


@given(st.integers(1, 12), st.integers(1, 12))
def test_processes_divide_a_batch_in_order(rows, num_processes):
    batch = np.arange(rows * num_processes)
    parts = [batch[local_rows(len(batch), p, num_processes)] for p in range(num_processes)]
    assert {len(part) for part in parts} == {rows}
    np.testing.assert_array_equal(np.concatenate(parts), batch)


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_every_epoch_holds_every_sample_once(num_samples, seed, epoch):
    order = shuffled(num_samples, seed)
    samples = [order[epoch * num_samples + i] for i in range(num_samples)]
    assert sorted(samples) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        tuple(shuffled(50, seed)[epoch * 50 + i] for i in range(50))
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(shuffled(50, 0)[i] for i in range(50))


@given(st.integers(2, 300), st.integers(1, 30), st.integers(1, 20))
def test_spread_starts_stay_inside_and_reach_both_ends(num_tokens, length, num_samples):
    length = min(length, num_tokens - 1)
    starts = spread_starts(num_tokens, length, num_samples)
    assert len(starts) == num_samples
    assert starts[0] == 0
    assert np.all(np.diff(starts) >= 0)
    assert starts[-1] == (num_tokens - length - 1 if num_samples > 1 else 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 0, 4), DivisibilityError, r"10 rows .* by 4 processes.*multiple of 4, such as 8"),
        ((3, 0, 4), DivisibilityError, r"3 rows .* by 4 processes.*such as 4"),
        ((8, 4, 4), ConfigError, r"process 4 of 4 does not exist: give one from 0 to 3"),
        ((0, 0, 1), ConfigError, r"global batch of 0 must have at least 1 row; raise it"),
    ],
)
def test_rows_that_cannot_be_divided(arguments, error, message):
    with pytest.raises(error, match=message):
        local_rows(*arguments)


def test_a_part_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"part 9 of 8 does not exist: give parts from 0 to 7"):
        rows_of_parts(16, [0, 9], 8)


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"seed -1 must lie in \[0, 2\^32\); choose another"):
        shuffled(3, -1)
