import dataclasses
import json

import pytest

from axon_dist.inspect import collectives
from axon_dist.mesh.chips import Machine, machine_of

MACHINE = Machine(
    name="toy",
    kinds=("toy",),
    flops=1e6,
    memory_bandwidth=1e12,
    link=1e3,
    network=1e3,
    node_size=0,
    memory_bytes=1,
)


def schedule(*lines):
    """Two gathers of 8 x 100 bytes (0.7 s each on the wire) around products of 0.524 s each."""
    body = "\n  ".join(lines)
    return f"""HloModule step, num_partitions=8

ENTRY %main (x: u8[100], a: f32[64,64]) -> f32[64,64] {{
  %x = u8[100]{{0}} parameter(0)
  %a = f32[64,64]{{1,0}} parameter(1)
  {body}
}}
"""


def start(n):
    return (
        f"%s{n} = (u8[100]{{0}}, u8[800]{{0}}) all-gather-start(%x), "
        "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    )


def done(n):
    return f"%d{n} = u8[800]{{0}} all-gather-done(%s{n})"


def product(n):
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%p{n} = f32[64,64]{{1,0}} dot(%a, %a), {dims}"


def judged(*lines, machine=MACHINE):
    return [row.exposure for row in collectives(schedule(*lines), machine=machine)]


def test_enough_compute_hides_a_transfer():
    assert judged(start(1), product(1), product(2), done(1)) == ["hidden"]


def test_too_little_compute_is_light():
    assert judged(start(1), product(1), done(1)) == ["light"]


def test_no_compute_is_exposed():
    assert judged(product(1), start(1), done(1), product(2)) == ["exposed"]


def test_one_product_does_not_hide_two_transfers():
    lines = (start(1), start(2), product(1), product(2), done(1), done(2))
    assert judged(*lines) == ["hidden", "light"]
    assert judged(*lines[:4], product(3), *lines[4:]) == ["hidden", "hidden"]


def test_waiting_for_one_transfer_gives_time_to_the_next():
    lines = (start(1), start(2), product(1), done(1), product(2), product(3), done(2))
    assert judged(*lines) == ["light", "hidden"]


def test_hidden_time_is_reported_in_seconds():
    ledger = collectives(schedule(start(1), product(1), done(1)), machine=MACHINE)
    (row,) = ledger
    assert row.seconds == pytest.approx(0.7)
    assert row.waited == pytest.approx(0.7 - 0.524288)
    assert ledger.seconds("light") == row.seconds
    assert ledger.waited() == row.waited
    assert ledger.light_bytes() == 700
    assert (ledger.exposed_bytes(), ledger.seconds("hidden")) == (0, 0)


def test_a_transfer_with_little_compute_is_not_hidden():
    lines = (start(1), product(1), done(1))
    for flops, expected in ((1e8, "exposed"), (5e7, "light")):
        fast = dataclasses.replace(MACHINE, flops=flops)
        assert judged(*lines, machine=fast) == [expected]


def test_a_wire_that_a_loop_shares_serves_the_outside_later():
    """0.7 s of wire outside and twice 0.7 s in a loop: its 1.5 s of products hide its own alone."""
    text = """HloModule step, num_partitions=8

%body (c: (f32[64,64], u8[100])) -> (f32[64,64], u8[100]) {
  %c = (f32[64,64]{1,0}, u8[100]{0}) parameter(0)
  %a = f32[64,64]{1,0} get-tuple-element(%c), index=0
  %x = u8[100]{0} get-tuple-element(%c), index=1
  STARTED
  %p1 = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %p2 = f32[64,64]{1,0} dot(%a, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  AWAITED
  ROOT %t = (f32[64,64]{1,0}, u8[100]{0}) tuple(%p2, %x)
}

%cond (c: (f32[64,64], u8[100])) -> pred[] {
  %c = (f32[64,64]{1,0}, u8[100]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: u8[100], a: f32[64,64]) -> u8[800] {
  %x = u8[100]{0} parameter(0)
  %a = f32[64,64]{1,0} parameter(1)
  %init = (f32[64,64]{1,0}, u8[100]{0}) tuple(%a, %x)
  %s1 = (u8[100]{0}, u8[800]{0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %w = (f32[64,64]{1,0}, u8[100]{0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"2"}}
  ROOT %d1 = u8[800]{0} all-gather-done(%s1)
}
"""
    silent = text.replace("STARTED", "").replace("AWAITED", "")
    busy = text.replace("STARTED", start(2)).replace("AWAITED", done(2))
    slow = dataclasses.replace(MACHINE, flops=2 * 2 * 2 * 64**3 / 1.5)
    judge = lambda text: [row.exposure for row in collectives(text, machine=slow)]
    assert judge(silent) == ["hidden"]
    assert judge(busy) == ["light", "hidden"]


def test_without_a_machine_nothing_is_called_hidden():
    lines = (start(1), product(1), product(2), done(1))
    assert judged(*lines, machine=None) == ["light"]


def test_compute_inside_a_loop_between_start_and_done_counts_as_often_as_it_runs():
    text = """HloModule step, num_partitions=8

%body (c: (f32[64,64])) -> (f32[64,64]) {
  %c = (f32[64,64]{1,0}) parameter(0)
  %e = f32[64,64]{1,0} get-tuple-element(%c), index=0
  %p = f32[64,64]{1,0} dot(%e, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[64,64]{1,0}) tuple(%p)
}

%cond (c: (f32[64,64])) -> pred[] {
  %c = (f32[64,64]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: u8[100], a: f32[64,64]) -> u8[800] {
  %x = u8[100]{0} parameter(0)
  %a = f32[64,64]{1,0} parameter(1)
  %init = (f32[64,64]{1,0}) tuple(%a)
  %s = (u8[100]{0}, u8[800]{0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %w = (f32[64,64]{1,0}) while(%init), condition=%cond, body=%body, backend_config=TRIPS
  ROOT %d = u8[800]{0} all-gather-done(%s)
}
"""
    for trips, expected in ((1, "light"), (2, "hidden")):
        config = {"known_trip_count": {"n": str(trips)}}
        ledger = collectives(text.replace("TRIPS", json.dumps(config)), machine=MACHINE)
        assert [row.exposure for row in ledger] == [expected]


def test_a_ring_that_leaves_the_node_shares_its_network():
    node = dataclasses.replace(MACHINE, link=400.0, network=50.0, node_size=4)
    inside, across = ((0, 1, 2, 3),), ((0, 4), (1, 5), (2, 6), (3, 7))
    everyone = (tuple(range(8)),)
    assert node.wire_seconds(400, inside) == pytest.approx(1)
    assert node.wire_seconds(400, across) == pytest.approx(8)
    assert node.wire_seconds(400, everyone) == pytest.approx(2)


def test_machines_are_found_by_their_devices():
    class Device:
        device_kind = "TPU v5 lite"

    class Mesh:
        class devices:
            flat = (Device(),)

    machine = machine_of(Mesh())
    assert machine is not None
    assert machine.name == "v5e"
    assert machine_of(None) is None
