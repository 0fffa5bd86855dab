"""A report of the memory, collectives and FLOPs of one compiled step.

The compilers for GPUs and TPUs run without the device. So a laptop can compile the step that would
train on a target, and report its memory, collectives and FLOPs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from ..core.compat import gpu_pipelining
from ..core.errors import UnsupportedError
from ..core.own_context import in_own_context
from ..core.tree import Where, leaves_with_paths, memory_of, shard_bytes
from ..core.typing import ArrayTree, JsonDict
from ..core.words import byte_size, si
from ..mesh import AxesLike, MeshSpec, World, build_mesh
from ..mesh.chips import Hardware, machine_of, unknown_chip
from ..mesh.targets import Target, as_target, prepare_environment
from .calls import Recomputed, attention_kernels, recomputed
from .flops import Flops, flops
from .ledger import Ledger, as_text
from .model_time import KINDS as TIMES
from .model_time import ModelTime, model_time
from .parse import as_module
from .transfers import collectives

_NARROW = 80
"""A terminal with fewer columns shows the source of a collective on a line of its own."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory that one execution of a compiled program needs on one device, in bytes.

    Args:
        arguments: the arguments.
        outputs: the results.
        aliased: results in the buffers of donated arguments.
        temporaries: intermediate values. On TPU, only those in main memory (HBM), not on the chip.
        generated_code: the program itself.
        host_arguments: arguments that stay in host memory. XLA:CPU counts these as `arguments`.
        host_temporaries: temporaries in host memory, such as offloaded activations.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int
    host_arguments: int = 0
    host_temporaries: int = 0

    @property
    def peak(self) -> int:
        """Arguments, temporaries, and the outputs that do not alias an argument.

        XLA's own `peak_memory_in_bytes` is not used: it omits the temporaries on CPU.
        """
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def table(self) -> Table:
        """Returns the report as a table for a terminal."""
        table = Table(title="memory per device")
        table.add_column("what")
        table.add_column("size", justify="right")
        for field in dataclasses.fields(self):
            table.add_row(field.name.replace("_", " "), byte_size(getattr(self, field.name)))
        table.add_section()
        table.add_row("peak", byte_size(self.peak))
        return table


def memory(compiled: jax.stages.Compiled) -> MemoryReport:
    """Asks the compiler for the memory that a program needs on each device.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.

    Returns:
        Bytes per device.

    Raises:
        UnsupportedError: if the backend does not report memory.

    Example:
        >>> import jax.numpy as jnp
        >>> compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(1000)).compile()
        >>> report = memory(compiled)
        >>> report.arguments, report.outputs, report.aliased
        (4000, 4000, 4000)
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise UnsupportedError(
            "this backend reports no memory_analysis(); compile for a target instead, such as "
            "target_mesh('h100:8', ...)"
        )
    temporaries = stats.temp_size_in_bytes
    places = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if {device.platform for place in places for device in place.device_set} == {"tpu"}:
        # On TPU `temp_size_in_bytes` counts more than the chip's main memory holds at once, such as
        # values in vector memory. XLA's peak does not. For a 1.3B step on v5p:2x2x2, the peak is
        # 3.41 GiB and XLA's report of memory in use 3.43, but by `temp_size_in_bytes` it is 3.82.
        between = (
            stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        )
        temporaries = min(temporaries, max(0, stats.peak_memory_in_bytes - between))
    return MemoryReport(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=temporaries,
        generated_code=stats.generated_code_size_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_temporaries=stats.host_temp_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """The bytes of one array of a tree.

    Args:
        path: the path of the array in the tree.
        shape: its global shape.
        dtype: its element type.
        spec: its partition spec, or the name of its sharding's class if that has no spec.
        bytes: bytes of the whole array.
        shard_bytes: bytes on one device.
        where: `device` or `host`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: int
    shard_bytes: int
    where: Where


def leaf_bytes(tree: ArrayTree) -> list[LeafBytes]:
    """Lists the bytes of every array of a tree on one device, in tree order.

    Example:
        >>> import jax.numpy as jnp
        >>> [(row.path, row.shard_bytes) for row in leaf_bytes({"w": jnp.ones((4, 4))})]
        [('w', 64)]
    """
    return [
        LeafBytes(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            spec=str(getattr(leaf.sharding, "spec", type(leaf.sharding).__name__)),
            bytes=math.prod(leaf.shape) * leaf.dtype.itemsize,
            shard_bytes=shard_bytes(leaf),
            where=memory_of(leaf),
        )
        for path, leaf in leaves_with_paths(tree)
    ]


def leaf_table(tree: ArrayTree) -> Table:
    """Returns the rows of `leaf_bytes` as a table for a terminal."""
    table = Table(title="bytes per device")
    for column in ("leaf", "shape", "dtype", "spec", "MB", "MB per device", "where"):
        table.add_column(column, justify="right" if "MB" in column else "left")
    for row in leaf_bytes(tree):
        sizes = (f"{row.bytes / 1e6:,.3f}", f"{row.shard_bytes / 1e6:,.3f}")
        table.add_row(row.path, str(row.shape), row.dtype, row.spec, *sizes, row.where)
    return table


AGREED = 0.1
"""The share by which compiled and traced FLOPs of a step may differ without a warning."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The cost of one step on one device; prints as tables with `rich`.

    Args:
        memory: the memory it needs.
        collectives: its collectives, and whether they are hidden.
        flops: its matrix operations.
        attention: fused attention kernels, and how often a step runs each.
        recomputed: the work that XLA rematerialises on its own.
        num_devices: the number of devices of the mesh.
        machine: the machine whose rates judged the transfers; None if unknown.
        is_cpu: whether it was compiled for CPUs, where exposure has no meaning.
        unknown: what cannot be reported because the chip is unknown; "" if it is known.
        traced_flops: matrix operations of the traced step; None if they were not counted.
        time: the modelled time of a step; None if the chip is unknown.
    """

    memory: MemoryReport
    collectives: Ledger
    flops: Flops
    attention: dict[str, int]
    recomputed: Recomputed
    num_devices: int
    machine: Hardware | None
    is_cpu: bool = False
    unknown: str = ""
    traced_flops: float | None = None
    time: ModelTime | None = None

    @property
    def flops_over_traced(self) -> float | None:
        """The FLOPs of the compiled step over those traced; None if either is unknown."""
        if not self.traced_flops or self.flops.unknown_trip or self.flops.opaque:
            return None
        return self.flops.high / self.traced_flops

    def warnings(self) -> list[str]:
        """Returns what is wrong with the compiled step, one sentence each."""
        warnings = [self.unknown] if self.unknown else []
        ratio = self.flops_over_traced
        if ratio is not None and self.traced_flops and abs(ratio - 1) > AGREED:
            (option,) = gpu_pipelining("all_gather")
            twice = (
                "recomputes some products; if weights are gathered for each microbatch, compare "
                f"with compiler_options={{{option!r}: None}}"
            )
            warnings.append(
                f"the compiled step has {ratio:.2f} times the products of the traced one, "
                f"{si(self.flops.high)} for {si(self.traced_flops)} FLOPs: the compiler "
                + (twice if ratio > 1 else "found products that nothing needs")
            )
        return warnings + self.collectives.lint()

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the memory of the machine; None if the machine is unknown."""
        return None if self.machine is None else self.memory.peak <= self.machine.memory_bytes

    def to_dict(self) -> JsonDict:
        """Returns the report as plain values."""
        ledger = self.collectives
        return {
            "num_devices": self.num_devices,
            "machine": self.machine.name if self.machine else None,
            "fits": self.fits,
            "memory": {**dataclasses.asdict(self.memory), "peak": self.memory.peak},
            "flops": dataclasses.asdict(self.flops),
            "traced_flops": self.traced_flops,
            "attention_kernels": self.attention,
            "recomputed": dataclasses.asdict(self.recomputed),
            "wire_bytes": ledger.total_wire_bytes(),
            "wire_bytes_by_kind": ledger.by_kind(),
            "wire_bytes_by_axis": ledger.by_axis(),
            "wire_bytes_by_link": ledger.by_link(),
            "wire_bytes_by_exposure": ledger.by_exposure(),
            "wire_seconds": ledger.seconds(),
            "waited_seconds": ledger.waited(),
            "step_seconds": ledger.step_seconds,
            "model_time": None if self.time is None else self.time.to_dict(),
            "waited_share": ledger.waited_share(),
            "lint": ledger.lint(),
            "collectives": ledger.to_rows(),
        }

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.memory.table()
        is_narrow = options.max_width < _NARROW
        yield self.collectives.table(exposure=not self.is_cpu, narrow=is_narrow)
        yield self._summary()
        kinds = {row.kind for row in self.collectives}
        if self.is_cpu and "reduce-scatter" not in kinds >= {"all-gather", "all-reduce"}:
            yield (
                "XLA:CPU's partitioner makes no reduce-scatters: a sum of which each rank keeps a "
                "slice is all-reduced here, at twice the bytes; Reduction(manual=True) scatters it"
            )
        yield from self.warnings()

    def _summary(self) -> Table:
        table = Table(title=f"one step on each of {self.num_devices} devices", show_header=False)
        ledger = self.collectives
        if not self.is_cpu and ledger.step_seconds:
            waited, step = (1e3 * x for x in (ledger.waited(), ledger.step_seconds))
            share = f"{waited:,.1f} of {step:,.1f} ms at peak rates, {ledger.waited_share():.1%}"
            table.add_row("waits for transfers", share)
        if not self.is_cpu and self.time is not None:
            parts = [
                f"{1e3 * seconds:,.1f} {TIMES[kind]}"
                for kind, seconds in self.time.seconds.items()
                if seconds >= 5e-5
            ]
            total = f"{1e3 * self.time.total:,.1f} ms at the rates that kernels reach"
            table.add_row("modelled step", ": ".join([total, ", ".join(parts)]))
        more = "+" if self.flops.unknown_trip or self.flops.opaque else ""
        is_exact = self.flops.low == self.flops.high
        # A pipeline runs the costliest branch in only some of its ticks.
        bound = "" if is_exact or more else "at most "
        table.add_row("matrix FLOPs, recomputed ones too", f"{bound}{si(self.flops.high)}{more}")
        if not is_exact:
            table.add_row("on the cheapest branches", f"at least {si(self.flops.low)}")
        if self.flops.opaque:
            table.add_row("not counted", ", ".join(self.flops.opaque))
        for name, count in self.attention.items():
            table.add_row("fused attention", f"{count} x {name}")
        if self.recomputed.count:
            table.add_row("recomputed by XLA itself", str(self.recomputed))
        for axis, total in ledger.by_axis().items():
            table.add_row(f"sent over {axis}", byte_size(total))
        for link, total in ledger.by_link().items():
            table.add_row(f"sent over {link} links", byte_size(total))
        if not self.is_cpu and ledger.seconds():
            table.add_row("ms on the wire", f"{ledger.seconds() * 1e3:,.1f}")
        table.add_row("peak memory", byte_size(self.memory.peak))
        if self.machine:
            capacity = f"{byte_size(self.machine.memory_bytes)} of {self.machine.name}"
            table.add_row("fits" if self.fits else "does NOT fit", capacity)
        return table


@in_own_context
def report(
    compiled: jax.stages.Compiled,
    mesh: jax.sharding.Mesh,
    machine: Hardware | None = None,
    traced_flops: float | None = None,
) -> Report:
    """Combines `memory`, `collectives`, `flops` and more for one compiled step.

    Args:
        compiled: the result of `jax.jit(step).lower(...).compile()`.
        mesh: the mesh it was compiled for.
        machine: the machine whose rates judge the transfers; looked up from the mesh's devices
            unless given.
        traced_flops: matrix operations of the traced step per device, from `planner.read_step`, to
            compare with.

    Returns:
        The report; `rich.print` shows it.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
        >>> report(compiled, mesh).to_dict()["wire_bytes"]
        0
    """
    machine = machine or machine_of(mesh)
    module = as_module(compiled)
    return Report(
        memory=memory(compiled),
        collectives=collectives(module, mesh, machine),
        flops=flops(module),
        attention=attention_kernels(module),
        recomputed=recomputed(module),
        num_devices=mesh.size,
        machine=machine,
        is_cpu=getattr(mesh.devices.flat[0], "platform", "") == "cpu",
        unknown=(machine is None and unknown_chip(mesh)) or "",
        traced_flops=traced_flops,
        time=model_time(module, mesh, machine),
    )


def target_devices(target: Target | str) -> Sequence[Any]:
    """Returns devices that programs can be compiled for but not run on.

    Args:
        target: a target or its name. For `cpu`, the result is the emulated devices of this process,
            which can run programs.

    Returns:
        All devices of the target.

    Raises:
        UnsupportedError: if the compiler is not installed, or knows no such slice.
        BackendStartedError: if JAX has already started without what the target needs.

    Example:
        >>> len(target_devices("cpu:1"))
        1
    """
    target = as_target(target)
    if target.platform == "cpu":
        world = World.emulate(target.num_devices)
        return list(world.mesh.devices.flat)
    prepare_environment(target)
    try:
        return topologies.get_topology_desc(**target.topology).devices
    except RuntimeError as error:
        raise UnsupportedError(
            f"the {target.platform} compiler cannot describe target {target.name!r} ({error}); "
            f"use a shape that exists, such as {' or '.join(target.examples)}"
        ) from error


def target_mesh(target: Target | str, axes: AxesLike) -> jax.sharding.Mesh:
    """Makes a mesh of the devices of a target, with all axes of type Auto.

    Args:
        target: a target or its name.
        axes: sizes by axis name, outer to inner; at most one is -1. Their product is the number of
            devices.

    Returns:
        The mesh. On TPU the devices are ordered by the wiring (`jax.make_mesh`), so that neighbours
        on an axis are neighbours in the torus. `World.init(axes, devices=target_devices(target))`
        makes the same mesh with a world around it.

    Raises:
        MeshError: if the sizes do not multiply to the number of devices.
        UnsupportedError: as in `target_devices`.
        BackendStartedError: as in `target_devices`.

    Example:
        >>> dict(target_mesh("cpu:1", {"dp": 1}).shape)
        {'dp': 1}
    """
    target = as_target(target)
    spec = MeshSpec(axes).resolve(target.num_devices)
    return build_mesh(spec, target_devices(target))
