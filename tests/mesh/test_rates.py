import itertools

import pytest

from axon_dist.mesh.chips import HARDWARE, hardware
from axon_dist.mesh.rates import (
    ATTENTION,
    CAUSAL,
    RATES,
    AttentionShape,
    ProductShape,
    attention_rate,
    rates_of,
)

H100 = RATES["h100"]


def speed(*sizes, **more):
    shape = ProductShape(*sizes, **more)
    return shape.flops / H100.product_seconds(shape)


def test_the_product_that_was_measured():
    assert speed(4224, 2048, 8192) == pytest.approx(780e12, rel=0.001)


def test_short_sums_narrow_results_and_wide_numbers_are_slower():
    assert speed(65536, 768, 768) < speed(65536, 768, 3072) < speed(65536, 768, 12288)
    assert speed(65536, 16, 768) < 0.3 * speed(65536, 768, 768)
    assert speed(2048, 50304, 768, written=4) < speed(2048, 50304, 768)


def test_a_product_and_its_transpose_take_as_long():
    for rows, columns, summed in itertools.product((64, 768, 5000), repeat=3):
        assert speed(rows, columns, summed) == speed(columns, rows, summed)


def test_a_long_sum_of_a_small_result_is_split():
    one_tile = ProductShape(128, 256, 2**20)
    alone = one_tile.flops / H100.products * H100.cores
    assert H100.product_seconds(one_tile) < alone / 10


def test_nothing_is_faster_than_the_peak():
    for row in HARDWARE.values():
        rates = rates_of(row)
        assert rates.products < row.flops
        assert rates.memory < row.memory_bandwidth
        shape = ProductShape(16384, 16384, 16384)
        assert shape.flops / rates.product_seconds(shape) < row.flops


def test_attention_lies_between_the_rows_of_its_table():
    def rate(length, **more):
        return attention_rate(AttentionShape(0, length, 128, is_backward=True, **more))

    assert rate(2048, is_causal=False) == ATTENTION[128, True][2]
    assert rate(100, is_causal=True) == ATTENTION[128, True][0] * CAUSAL[0]
    assert rate(2**20, is_causal=False) == ATTENTION[128, True][-1]
    low, middle, high = (rate(length, is_causal=True) for length in (1024, 1448, 2048))
    assert low < middle < high


def test_a_chip_that_was_not_measured_says_so():
    assert rates_of(hardware("b200")).source.startswith("not measured")
    assert rates_of(hardware("h100")) is H100


def test_a_hidden_transfer_takes_processors_of_a_gpu():
    assert H100.slowdown(132.0) == 24.0
    assert rates_of(hardware("a100-80")).slowdown(108.0) == 24.0
    assert rates_of(hardware("v5p")).slowdown(1.0) == 0.0
