"""A trace of known times: every moment has one owner, and the rows add up to the step."""

import dataclasses
import types

import pytest

from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.inspect import Event, Waterfall, read_trace, waterfall
from axon_dist.inspect.parse import own_lines
from axon_dist.inspect.timeline import _events

PROGRAM = """HloModule jit_step, num_partitions=2

FileNames
1 "/home/me/model.py"
2 "/opt/site-packages/flax/nnx/nn/linear.py"
3 "/home/me/attention.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7}
2 {file_name_id=2 function_name_id=1 line=422 end_line=422}
3 {file_name_id=3 function_name_id=1 line=9 end_line=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}

%moved (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %t = f32[64,64]{1,0} transpose(%p), dimensions={1,0}
}

%added (q: f32[64,64]) -> f32[64,64] {
  %q = f32[64,64]{1,0} parameter(0)
  ROOT %e = f32[64,64]{1,0} add(%q, %q), metadata={op_name="add" stack_frame_id=1}
}

ENTRY %main (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %dot.1 = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="layer/dot" stack_frame_id=2}
  %again.1 = f32[64,64]{1,0} dot(%a, %dot.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="rematted_computation/dot" stack_frame_id=2}
  %scores.1 = f32[64,64]{1,0} dot(%a, %dot.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="dot" stack_frame_id=3}
  %add_fusion.3 = f32[64,64]{1,0} fusion(%dot.1), kind=kLoop, calls=%added
  %transpose_fusion = f32[64,64]{1,0} fusion(%a), kind=kLoop, calls=%moved
  ROOT %all-reduce.1 = f32[64,64]{1,0} all-reduce(%add_fusion.3), replica_groups={{0,1}}
}
"""  # noqa: E501

FLOPS = 2 * 64**3
PEAK = FLOPS / 10e-9
"""A product takes 10 ns at the peak."""

STEP = (
    ("dot.1", 0, 40),
    ("again.1", 40, 60),
    ("scores.1", 60, 90),
    # The sum begins during a kernel, and 25 ns of it are exposed.
    ("add_fusion.3", 95, 105),
    ("all-reduce.1", 100, 130),
    ("transpose_fusion", 130, 140),
)
SECONDS = {
    "products": 30, "attention": 20, "recomputed": 20, "kernels": 10, "copies": 10, "wire": 25,
    "gaps": 5, "host": 60,
}  # fmt: skip
PERIOD = 200


def traced(runs=4, devices=2, step=STEP, run_ids=True):
    return [
        Event(name, "jit_step", device, PERIOD * run + start, PERIOD * run + end,
              run if run_ids else None)
        for device in range(devices)
        for run in range(runs)
        for name, start, end in step
    ]  # fmt: skip


def read(events, runs=4):
    return waterfall(events, PROGRAM, runs, PEAK, "made up", "toy")


def in_ns(found):
    return {loss.kind: pytest.approx(1e9 * loss.seconds) for loss in found.losses}


@pytest.mark.parametrize("run_ids", [True, False])
def test_every_moment_has_one_owner(run_ids):
    found = read(traced(run_ids=run_ids))
    assert in_ns(found) == SECONDS
    assert 1e9 * found.step_seconds == pytest.approx(PERIOD)
    # Of three products one is computed again, and counts as lost.
    assert 1e9 * found.useful_seconds == pytest.approx(20)
    assert found.utilization == pytest.approx(0.1)
    assert (found.num_steps, found.num_devices, found.flops) == (2, 2, 2 * FLOPS)
    assert sum(percent for _, percent, *_ in found.rows()) == pytest.approx(100)


def test_each_loss_has_its_line():
    lines = {loss.kind: loss.places[0].source for loss in read(traced()).losses if loss.places}
    # The line that called the library, not that of the library.
    assert lines["products"] == lines["recomputed"] == "model.py:7"
    assert lines["attention"] == "attention.py:9"
    assert lines["kernels"] == lines["gaps"] == "model.py:7"


def test_a_loop_body_is_not_counted_twice():
    program = PROGRAM.replace(
        "ROOT %all-reduce.1",
        "%w = f32[64,64]{1,0} while(%a), body=%moved, condition=%moved, "
        'backend_config={"known_trip_count":{"n":"1"}}\n  ROOT %all-reduce.1',
    )
    inside = (("w", 0, 100), ("dot.1", 10, 50), ("add_fusion.3", 60, 100))
    found = waterfall(traced(step=inside), program, 4, PEAK, "made up")
    assert in_ns(found) == {
        **dict.fromkeys(SECONDS, 0), "products": 30, "kernels": 40, "gaps": 20, "host": 100,
    }  # fmt: skip


def test_kernels_without_an_instruction_are_known_by_their_names():
    names = {
        "dot.1": "nvjet_tst_128x256", "again.1": "MemcpyD2D", "scores.1": "fmha_bwd",
        "add_fusion.3": "add_fusion_3", "all-reduce.1": "ncclDevKernel_AllReduce",
        "transpose_fusion": "some_kernel",
    }  # fmt: skip
    step = tuple((names[name], start, end) for name, start, end in STEP)
    events = [dataclasses.replace(e, program="") for e in traced(step=step, run_ids=False)]
    found = read(events)
    assert sum(percent for _, percent, *_ in found.rows()) == pytest.approx(100)
    # The three products of the program are shared by the two kernels, by their times.
    ideal = 3 * 10
    assert 1e9 * found.useful_seconds == pytest.approx(ideal)
    lost = in_ns(found)
    assert lost["copies"] == 20
    assert lost["wire"] == 25
    assert lost["kernels"] == 20
    assert lost["products"] == 40 - ideal * 40 / 70


CONDITIONAL = PROGRAM.replace(
    "ENTRY",
    """%busy (p.1: f32[64,64]) -> f32[64,64] {
  %p.1 = f32[64,64]{1,0} parameter(0)
  %again.2 = f32[64,64]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="F/axon_dist_run_twice/dot" stack_frame_id=1}
  ROOT %again.3 = f32[64,64]{1,0} dot(%again.2, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%idle (p.2: f32[64,64]) -> f32[64,64] {
  ROOT %p.2 = f32[64,64]{1,0} parameter(0)
}

ENTRY""",  # noqa: E501
).replace(
    "ROOT %all-reduce.1",
    "%which = s32[] constant(0)\n  %tick = f32[64,64]{1,0} conditional(%which, %a, %a), "
    "branch_computations={%busy, %idle}\n  ROOT %all-reduce.1",
)  # fmt: skip
"""A program that may also run a stage forward, which its backward pass runs again."""


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_branch_counts_as_often_as_it_runs(ticks):
    # The compiler dropped the name of the second product.
    branch = (("again.2", 140, 145), ("again.3", 145, 150))
    step = (*STEP, *branch * ticks)
    found = waterfall(traced(step=step), CONDITIONAL, 4, PEAK, "made up")
    # The products in the branch are recomputed, so they count in no case.
    assert found.flops == pytest.approx(2 * FLOPS)
    assert in_ns(found) == {**SECONDS, "recomputed": 20 + 10 * ticks, "host": 60 - 10 * ticks}


def test_kernels_without_an_instruction_get_no_products_that_only_a_branch_has():
    names = {"dot.1": "nvjet_tst_128x256", "scores.1": "nvjet_other", "again.1": "nvjet_third"}
    step = tuple((names.get(name, name), start, end) for name, start, end in STEP)
    found = waterfall(traced(step=step), CONDITIONAL, 4, PEAK, "made up")
    assert found.flops == pytest.approx(3 * FLOPS)


def test_another_program_is_no_part_of_the_step():
    other = [
        Event("dot.1", "jit_metrics", 0, PERIOD * run + 150, PERIOD * run + 160, 10 + run)
        for run in range(4)
    ]
    found = read(traced(devices=1) + other)
    assert in_ns(found) == {**SECONDS, "kernels": 20, "host": 50}


def test_products_faster_than_the_peak_count_as_at_the_peak():
    found = waterfall(traced(), PROGRAM, 4, PEAK / 10, "too low")
    assert in_ns(found)["products"] == 0
    assert 1e9 * found.useful_seconds == pytest.approx(70)
    assert any("faster than the peak" in note for note in found.notes)


def test_too_few_steps_and_another_program_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"2 of 2 steps can be distinguished.*a profile needs 3"
    ):
        read(traced(runs=2), runs=2)
    strange = [dataclasses.replace(event, program="jit_other") for event in traced()]
    with pytest.raises(UnsupportedError, match="no operation of the trace belongs to the compiled"):
        read(strange)
    with pytest.raises(ConfigError, match="peak_flops=0"):
        waterfall(traced(), PROGRAM, 4, 0, "")


def test_rows_that_do_not_add_up_are_refused():
    found = read(traced())
    assert Waterfall.from_dict(found.to_dict()) == found
    with pytest.raises(ConfigError, match=r"add up to 2e-07 s, and the step took 3e-07 s"):
        dataclasses.replace(found, step_seconds=3e-7)
    with pytest.raises(ConfigError, match="must have"):
        dataclasses.replace(found, losses=found.losses[1:])
    with pytest.raises(ConfigError, match="this is not a waterfall"):
        Waterfall.from_dict({"losses": [{}]})
    with pytest.raises(ConfigError, match="this is not a waterfall"):
        Waterfall.from_dict({**found.to_dict(), "losses": None})


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(UnsupportedError, match="holds no trace"):
        read_trace(tmp_path)


def plane(name, line, event, **stats):
    one = types.SimpleNamespace(name=event, start_ns=5, duration_ns=2, stats=stats.items())
    lines = [
        types.SimpleNamespace(name=line, events=[one]),
        types.SimpleNamespace(name="Steps", events=[one]),
    ]
    return types.SimpleNamespace(name=name, lines=lines)


def test_planes_of_each_kind_of_device():
    gpu = plane("/device:GPU:1", "Stream #13(Compute)", "loop", hlo_op="add.1", hlo_module="m")
    assert list(_events(gpu)) == [Event("add.1", "m", 1, 5, 7)]
    tpu = plane("/device:TPU:0", "XLA Ops", "%fusion.3 = bf16[8]{0} fusion(%x), kind=kLoop")
    assert list(_events(tpu)) == [Event("fusion.3", "", 0, 5, 7)]
    cpu = plane("/host:CPU", "tf_XLA", "dot", hlo_op="dot", run_id=3, device_ordinal=2)
    assert set(_events(cpu)) == {Event("dot", "", 2, 5, 7, 3)}
    assert not list(_events(plane("/host:CPU", "python", "train_step", step_num=1)))


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_frames_of_libraries_are_passed_over(folder):
    assert own_lines(PROGRAM.replace("site-packages", folder).splitlines()) == {
        1: "model.py:7",
        2: "model.py:7",
        3: "attention.py:9",
    }


def test_a_step_of_seconds_is_shown_without_exponents():
    found = read(traced())
    losses = tuple(
        dataclasses.replace(loss, seconds=9.0 if loss.kind == "host" else 0.0, places=())
        for loss in found.losses
    )
    text = str(dataclasses.replace(found, useful_seconds=3.345, losses=losses, step_seconds=12.345))
    assert "12,345" in text
    assert "e+" not in text
