import itertools

import numpy as np
import pytest
from flax import nnx

from axon_dist import Pipeline, fsdp
from axon_dist.core.errors import ConfigError, NamedChoice, ScheduleError
from axon_dist.schedule import SCHEDULES, PipelineSchedule, build_schedule, validate


def test_every_name_has_a_row_and_every_table_its_name():
    assert set(SCHEDULES) == set(PipelineSchedule)
    for name, builder in SCHEDULES.items():
        table = build_schedule(name, 4, 8)
        assert table.name == name
        assert table.num_devices == 4
        assert table.chunks == builder.chunks


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1), (3, 2), (4, 4)],
        pytest.param(list(itertools.product(range(1, 10), range(1, 20))), marks=pytest.mark.full),
    ],
)
def test_tables_of_builders_are_valid(sizes):
    free = {name: (1, 2, 3) for name, builder in SCHEDULES.items() if builder.any_chunks}
    for (name, builder), size in itertools.product(SCHEDULES.items(), sizes):
        for chunks in free.get(name, (builder.chunks,)):
            try:
                table = build_schedule(name, *size, chunks)
            except ScheduleError:
                continue  # Sizes that this schedule cannot do.
            validate(table)
            assert (table.num_devices, table.num_microbatches, table.chunks) == (*size, chunks)


def test_names_may_be_text():
    assert build_schedule("1f1b", 4, 8) == build_schedule(PipelineSchedule.ONE_F_ONE_B, 4, 8)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ScheduleError, match=r"'1fb1'.*Did you mean '1f1b'\?.*zero_bubble_v"):
        build_schedule("1fb1", 4, 8)


def test_chunks_where_they_are_free():
    assert build_schedule("interleaved_1f1b", 4, 8, chunks=4).num_stages == 16
    assert build_schedule("looped_bfs", 4, 8, chunks=3).num_stages == 12
    assert build_schedule("zero_bubble_v", 4, 8, chunks=2).num_stages == 8
    assert build_schedule("gpipe", 4, 8, chunks=1).num_stages == 4


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("zero_bubble_v", 1), ("gpipe", 0)])
def test_chunks_where_they_are_fixed(name, chunks):
    with pytest.raises(
        ScheduleError, match=rf"{name} got chunks={chunks}.*or use interleaved_1f1b"
    ):
        build_schedule(name, 4, 8, chunks=chunks)
    with pytest.raises(ScheduleError, match="got chunks=0"):
        build_schedule("looped_bfs", 4, 8, chunks=0)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_sizes_may_be_numpy_integers(name):
    two = np.int64(2)
    table = build_schedule(name, two, np.int32(4), two if name != "1f1b" else None)
    assert table == build_schedule(name, 2, 4)
    assert type(table.num_microbatches) is int
    with pytest.raises(ScheduleError, match=r"got num_devices=np.float64\(2.0\).*an integer"):
        build_schedule(name, np.float64(2), 4)


CHOICES = [x for x in NamedChoice.__subclasses__() if x.__module__.startswith("axon_dist.")]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda x: x.__name__)
def test_names_of_every_choice_are_found_in_any_case(choices):
    names = [member.value.lower() for member in choices]
    assert len(set(names)) == len(names)
    for member in choices:
        for name in (member.value, member.value.upper(), member.value.title()):
            assert choices(name) is member
    for other in ("nothing", 3, None, ""):
        assert choices.named(other) is None
        with pytest.raises(ConfigError, match="has no such member"):
            choices(other)


def test_names_in_another_case_build_the_same():
    assert build_schedule("1F1B", 4, 8) == build_schedule("1f1b", 4, 8)
    assert fsdp("HYBRID_SHARD", ("dp", "fsdp")) == fsdp("hybrid_shard", ("dp", "fsdp"))
    stages = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
    named = [Pipeline.from_modules(stages, 4, name) for name in ("ZERO_BUBBLE_V", "zero_bubble_v")]
    assert named[0].schedule == named[1].schedule
