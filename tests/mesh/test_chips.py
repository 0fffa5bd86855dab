import ast
import dataclasses
import math
import pathlib
import re
import types

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import axon_dist
from axon_dist import inspect, planner
from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import (
    DOUBLE_BUFFERED,
    HARDWARE,
    IN_PARALLEL,
    SCHEDULED,
    hardware,
    machine_of,
    option_names,
    options_row_of,
    parse_cluster,
    unknown_chip,
)
from axon_dist.mesh.targets import parse_target
from axon_dist.planner import parse_bytes, parse_count

PACKAGE = pathlib.Path(axon_dist.__file__).parent


def test_the_rate_of_each_chip_is_stated_once():
    """Read as numbers, so that no spelling hides one: every literal of every file.

    Files whose text has no such number, in prose neither, are not parsed.
    """
    asked = {989.0, *(float(row.flops) for row in HARDWARE.values())}
    stated = [
        (path.name, node.value)
        for path in PACKAGE.rglob("*.py")
        if asked & numbers_in(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, float | int)
    ]
    for row in HARDWARE.values():
        assert [where for where, number in stated if number == row.flops] == ["chips.py"], row.name
    assert not any(number == 989 for _, number in stated)


NUMBER = re.compile(
    r"0x[0-9a-f_]+|0o[0-7_]+|0b[01_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:e[+-]?[0-9_]+)?",
    re.IGNORECASE,
)


def numbers_in(text):
    """The values of all that can be a number there, of every spelling that Python reads."""
    found = {word.replace("_", "") for word in NUMBER.findall(text)}
    return {float(int(x, 0)) if x[1:2].isalpha() and x[1] not in "eE" else float(x) for x in found}


@pytest.mark.parametrize("text", ["989", "9_89", "0x3DD", "989.", "9.89e2", "0.989E+3", "x=[989]"])
def test_every_spelling_of_a_number_is_read(text):
    assert 989.0 in numbers_in(text)


def test_planner_and_inspect_read_the_same_rows():
    assert inspect.MACHINES == tuple(planner.HARDWARE.values()) == tuple(HARDWARE.values())
    assert inspect.Machine is planner.Hardware
    assert all(parse_target(f"{name}:{shape}").machine is row for name, row, shape in SHAPES)


SHAPES = [(name, row, shape) for name, row in HARDWARE.items() for shape in row.wiring.examples]


@pytest.mark.parametrize("name", [name for name, row in HARDWARE.items() if row.node_size])
def test_descriptions_for_the_compiler_are_those_of_the_rows(name):
    """A field that XLA reads in addition to the table: the memory it may use, and its name."""
    row = HARDWARE[name]
    text = parse_target(f"{name}:{row.wiring.examples[0]}").topology["target_config"]
    field = lambda key: re.search(rf"\b{key}: (\S+)", text).group(1)
    assert int(field("device_memory_size")) == row.memory_bytes
    assert int(field("memory_bandwidth")) == pytest.approx(row.memory_bandwidth, rel=0.05)
    found = re.search(r"capability { major: (\d+) minor: (\d+) }", text)
    assert ".".join(found.groups()) == row.capability
    kind = re.search(r'device_description_str: "(.*)"', text).group(1)
    assert machine_of(mesh_of(kind)) is row


def mesh_of(kind, capability=None, platform="gpu"):
    device = types.SimpleNamespace(
        device_kind=kind, compute_capability=capability, platform=platform
    )
    return types.SimpleNamespace(devices=np.array([device]))


def test_every_chip_has_its_own_names():
    called = [word for row in HARDWARE.values() for word in (row.name, *row.aliases)]
    assert len(set(called)) == len(called)
    assert hardware("trillium") is hardware("v6e")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 SXM5 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96"), ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU7x", "tpu7x"),
        ("TPU v4", "v4"), ("TPU v4 lite", None), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H20", None), ("NVIDIA GeForce RTX 5090", None), ("cpu", None), (None, None),
    ],
)  # fmt: skip
def test_chips_are_known_by_what_they_are(kind, name):
    row = machine_of(mesh_of(kind))
    assert (row and row.name) == name
    named = [row for row in HARDWARE.values() if any(re.fullmatch(x, str(kind)) for x in row.kinds)]
    assert len(named) == (name is not None)


@pytest.mark.parametrize(
    ("kind", "capability", "options"),
    [
        ("NVIDIA GeForce RTX 5090", "12.0", "with the options of b300"),
        ("NVIDIA GeForce RTX 4090", "8.9", "with the options of a100-40"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "9.0", "with the options of h100"),
        ("Tesla V100-SXM2-16GB", "7.0", "without options of their own"),
        ("AMD Instinct MI300X", "gfx942", "without options of their own"),
        ("TPU v3", None, "without options of their own"),
    ],
)
def test_an_unknown_chip_is_reported(kind, capability, options):
    mesh = mesh_of(kind, capability)
    assert unknown_chip(mesh) == (
        f"the table of chips has no row for {kind!r}: steps are compiled {options}, and neither "
        "times nor whether memory suffices is known"
    )
    row = options_row_of(mesh)
    assert ("without" in options) == (row is None)


def test_a_chip_of_a_row_and_emulated_devices_leave_nothing_to_say():
    assert unknown_chip(mesh_of("NVIDIA H200")) is None
    assert unknown_chip(mesh_of("cpu", platform="cpu")) is None


def test_options_go_by_what_travels_how_far():
    """Two iterations at a time where loops gather; several gathers at once between nodes."""
    h100, ampere = hardware("h100"), hardware("a100-80")
    (twice,), (many,) = DOUBLE_BUFFERED, IN_PARALLEL
    assert h100.options_for(8)[twice] is True
    assert h100.options_for(8, whole=True)[twice] is False
    assert many not in h100.options_for(8)
    assert h100.options_for(16)[many] == 8
    assert many not in h100.options_for(16, parallel=False)
    assert h100.options_for(8, parallel=True)[many] == 8
    assert twice not in ampere.options_for(64)
    assert set(SCHEDULED) <= set(ampere.options_for(8))
    assert ampere.options_for(8)[many] == 16
    assert set(option_names()) >= {twice, many, *SCHEDULED}


def test_every_row_has_a_source():
    assert all(row.source and row.name == name for name, row in HARDWARE.items())


@given(
    name=st.sampled_from(sorted(HARDWARE)),
    ranks=st.integers(1, 512),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_a_ring_is_bound_by_wires_that_there_are(name, ranks, stride):
    row = hardware(name)
    assert min(row.link, row.network) <= row.bandwidth(ranks, stride) <= row.link
    assert row.ring_latency(ranks, stride) >= (ranks - 1) * row.link_latency


def test_rings_between_nodes():
    h100 = hardware("h100")
    assert h100.bandwidth(8) == 450e9  # inside a node
    assert h100.bandwidth(16) == 8 * 50e9  # a node's eight ports together
    assert h100.bandwidth(2, stride=8) == 50e9  # one port
    assert h100.bandwidth(4, stride=4) == 2 * 50e9
    assert h100.ring_latency(16) == pytest.approx(14 * 3.4e-6 + 14e-6)


@given(
    name=st.sampled_from(sorted(HARDWARE)),
    ranks=st.integers(2, 64),
    stride=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
)
@example(name="h100", ranks=12, stride=1)
def test_the_planner_and_inspect_agree_about_a_ring(name, ranks, stride):
    """One counts nodes from a stride, the other from the members of every group."""
    row = hardware(name)
    groups = tuple(tuple(start + stride * rank for rank in range(ranks)) for start in range(stride))
    assert row.wire_seconds(10**9, groups) == pytest.approx(10**9 / row.bandwidth(ranks, stride))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10O:8", "the table of chips has no 'h10O'. Did you mean 'h100'"),
        ("h100:", "cannot read the number of devices '' in 'h100:'; write it as in h100:8"),
        ("h100:0", "cannot read the number of devices '0'"),
        ("v5p:2xx2", "cannot read the number of devices '2xx2'"),
    ],
)
def test_unreadable_targets(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "largest"),
    [("v4:16x16x17", 4096), ("v5e:1024", 256), ("v5p:8960", 6144), ("v6e:512", 256),
     ("ironwood:20000", 18432)],
)  # fmt: skip
def test_a_slice_has_no_more_devices_than_its_links_join(text, largest):
    chip = hardware(text.partition(":")[0]).name
    message = f"devices of {chip}, but its largest slice has {largest}, .*; take at most {largest}"
    with pytest.raises(ConfigError, match=message) as caught:
        parse_cluster(text)
    assert caught.value.code == "slice-too-large"
    assert parse_cluster(f"{chip}:{largest}")[1] == largest
    assert parse_cluster("h100:128x8")[1] == 1024


def test_impossible_hardware():
    with pytest.raises(ConfigError, match="'h100' has flops=0; it must be a positive number"):
        dataclasses.replace(hardware("h100"), flops=0)
    with pytest.raises(ConfigError, match="node_size=-1; it must be the devices per node, or 0"):
        dataclasses.replace(hardware("h100"), node_size=-1)


@given(value=st.integers(1, 999), unit=st.sampled_from(["B", "KB", "MB", "GB", "GiB", "TB"]))
def test_sizes(value, unit):
    scale = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "GiB": 2**30, "TB": 1e12}[unit]
    assert parse_bytes(f"{value} {unit}") == value * scale


@given(value=st.integers(1, 10**15))
def test_plain_numbers_are_themselves(value):
    assert parse_bytes(value) == parse_count(value) == value
    assert math.isclose(parse_count(f"{value:e}"), value, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "eighty", "cannot read 'eighty' as a size in bytes; write it as in 80GB"),
        (parse_bytes, "80GX", "unknown unit 'GX' in '80GX'. Did you mean 'GB'"),
        (parse_bytes, "0GB", "got '0GB'; a size in bytes must be positive, as in 80GB"),
        (parse_count, "-7B", "cannot read '-7B' as a number of parameters; write it as in 7e9"),
        (parse_count, "7Q", "unknown unit 'Q' in '7Q'"),
    ],
)
def test_unreadable_quantities(parse, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_dtype_of_eight_bytes_has_no_rate_rather_than_that_of_bfloat16():
    for row in HARDWARE.values():
        assert row.rate("float64") is row.rate("complex64") is None
        assert row.rate("bfloat16") == row.flops
