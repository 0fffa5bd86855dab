import io
import json

import pytest
from rich.console import Console

from axon_dist.core.errors import ConfigError, MeshError
from axon_dist.inspect import Collective, Ledger, ring_bytes


def row(**changes):
    defaults = dict(
        name="all-reduce.1",
        kind="all-reduce",
        dtypes=("f32",),
        num_arrays=1,
        bytes_in=100,
        bytes_out=100,
        group_size=2,
        wire_bytes=100,
        count=1,
        unknown_trip=False,
        in_conditional=False,
        axes=("dp",),
        is_async=False,
        exposure="exposed",
        seconds=None,
        waited=None,
        op_name="",
        source="step.py:3",
    )
    return Collective(**{**defaults, **changes})


@pytest.fixture
def ledger():
    return Ledger(
        (
            row(),
            row(kind="all-gather", wire_bytes=10, count=24, axes=("fsdp",), exposure="light"),
            row(kind="all-gather", wire_bytes=5, axes=("dp", "fsdp"), exposure="hidden"),
            row(kind="reduce-scatter", wire_bytes=7, axes=None, exposure="hidden"),
        ),
        mesh_axes=("dp", "fsdp"),
    )


def test_totals_add_up(ledger):
    assert ledger.total_wire_bytes() == 352
    assert ledger.by_kind() == {"all-reduce": 100, "all-gather": 245, "reduce-scatter": 7}
    assert ledger.by_axis() == {"dp": 100, "fsdp": 240, "dp,fsdp": 5, "?": 7}
    assert ledger.by_exposure() == {"exposed": 100, "light": 240, "hidden": 12}
    assert ledger.exposed_bytes() == 100
    assert ledger.num_executions() == 27
    assert len(ledger) == 4


def test_selections(ledger):
    assert ledger.total_wire_bytes(kind="all-gather") == 245
    assert ledger.total_wire_bytes(axis="fsdp") == 240
    assert ledger.total_wire_bytes(axis=("fsdp", "dp")) == 5
    assert ledger.total_wire_bytes(kind="all-reduce", axis="fsdp") == 0


def test_unknown_names_are_refused(ledger):
    with pytest.raises(ConfigError, match=r"'all-gathers'.*Did you mean 'all-gather'"):
        ledger.total_wire_bytes(kind="all-gathers")
    with pytest.raises(MeshError, match=r"no axis 'fdsp'.*Did you mean 'fsdp'"):
        ledger.total_wire_bytes(axis="fdsp")
    with pytest.raises(MeshError, match=r"'dp' is not known.*collectives\(program, mesh\)"):
        Ledger((row(axes=None),)).total_wire_bytes(axis="dp")


def test_rows_are_ready_for_json(ledger):
    rows = json.loads(json.dumps(ledger.to_rows()))
    assert rows[1]["total_bytes"] == 240
    assert rows[3]["axis"] == "?"


def test_the_table_joins_equal_rows():
    twice = Ledger((row(wire_bytes=3_000_000, count=2), row(wire_bytes=3_000_000, count=5)))
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(twice.table())
    text = capture.get()
    (line,) = (line for line in text.splitlines() if "step.py:3" in line)
    assert line.split() == [
        *("all-reduce", "dp", "f32", "7", "3", "MB", "21", "MB", "exposed", "step.py:3")
    ]


def test_lint_names_where():
    findings = Ledger(
        (
            row(kind="collective-permute", in_conditional=True, name="cp.1"),
            row(in_conditional=True),
            row(unknown_trip=True, source="", op_name="jit(f)/psum"),
        )
    ).lint()
    assert len(findings) == 2
    assert findings[0].startswith("cp.1 (step.py:3) is a collective-permute inside a conditional")
    assert findings[1].startswith("all-reduce.1 (jit(f)/psum) is inside a loop")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", 2 * 800 * 7 // 8),
        ("all-gather", 6400 * 7 // 8),
        ("reduce-scatter", 800 * 7 // 8),
        ("all-to-all", 800 * 7 // 8),
        ("collective-permute", 800),
    ],
)
def test_ring_costs(kind, expected):
    bytes_out = {"all-gather": 6400, "reduce-scatter": 100}.get(kind, 800)
    assert ring_bytes(kind, 800, bytes_out, 8) == expected
    assert ring_bytes(kind, 800, bytes_out, 1) == 0


def test_the_table_tells_how_many_milliseconds_are_covered():
    rows = (
        row(exposure="light", seconds=2e-3, waited=0.5e-3, count=4),
        row(exposure="hidden", seconds=1e-3, waited=0.0),
    )
    console = Console(file=io.StringIO(), width=140)
    with console.capture() as capture:
        console.print(Ledger(rows).table())
    lines = [line.split() for line in capture.get().splitlines()]
    (light,) = [line for line in lines if line[:1] == ["light"]]
    assert light[1:] == ["400", "B", "6.0", "of", "8.0", "ms"]
    assert any("light 6.0 of 8.0 ms" in " ".join(line) for line in lines[:-4])
    (total,) = [line for line in lines if line[:1] == ["total"]]
    assert total[1:] == ["500", "B", "7.0", "of", "9.0", "ms"]
