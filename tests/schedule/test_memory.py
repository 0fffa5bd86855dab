import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    PipelineMemoryStats,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble_h2,
    zero_bubble_v,
)

SIZES = [(1, 1), (2, 4), (4, 2), (4, 8), (8, 8), (5, 3), (16, 64)]


@pytest.mark.parametrize("sizes", SIZES)
def test_closed_forms_equal_the_count_in_the_table(sizes):
    stats = PipelineMemoryStats
    assert stats.gpipe_peak_activations(*sizes) == stats.of(gpipe(*sizes))
    assert stats.one_f_one_b_peak_activations(*sizes) == stats.of(one_f_one_b(*sizes))


@pytest.mark.parametrize(
    ("sizes", "worst", "total"), [((4, 8), (8, 4), (32, 10)), ((4, 2), (2, 2), (8, 7))]
)
def test_worst_and_total(sizes, worst, total):
    gpipe_stats = PipelineMemoryStats.gpipe_peak_activations(*sizes)
    stats = PipelineMemoryStats.one_f_one_b_peak_activations(*sizes)
    assert (gpipe_stats.worst, stats.worst) == worst
    assert (gpipe_stats.total, stats.total) == total


def test_per_stage():
    assert PipelineMemoryStats.gpipe_peak_activations(4, 8).per_stage == (8, 8, 8, 8)
    assert PipelineMemoryStats.one_f_one_b_peak_activations(4, 8).per_stage == (4, 3, 2, 1)
    assert PipelineMemoryStats.of(zero_bubble_h2(4, 8)).per_stage == (7, 5, 3, 1)


def test_a_device_with_chunks_peaks_below_the_sum_of_its_stages():
    stats = PipelineMemoryStats.of(interleaved_1f1b(4, 8))
    assert stats.per_device == (11, 9, 7, 5)
    assert len(stats.per_stage) == 8
    for table in (interleaved_1f1b(4, 8), zero_bubble_v(4, 8)):
        stats = PipelineMemoryStats.of(table)
        for device, peak in enumerate(stats.per_device):
            stages = [stats.per_stage[stage] for stage in table.stages_of(device)]
            assert max(stages) <= peak <= sum(stages)


def test_sizes_are_checked():
    with pytest.raises(ScheduleError, match=r"got num_stages=0.*at least 1"):
        PipelineMemoryStats.gpipe_peak_activations(0, 8)
    with pytest.raises(ScheduleError, match=r"got num_microbatches=0.*at least 1"):
        PipelineMemoryStats.one_f_one_b_peak_activations(4, 0)
