"""Reports the costs of a run from its compiled step, without training or writing anything."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from axon_dist.core.checks import checked
from axon_dist.core.errors import MeshError
from axon_dist.core.files import Place, as_place
from axon_dist.core.plain_yaml import to_yaml
from axon_dist.core.tree import num_bytes, own_bytes
from axon_dist.core.words import byte_size, plural, si
from axon_dist.inspect import Report, lower_outer_steps, report, target_devices
from axon_dist.mesh import MeshSpec, Target, World, parse_target, prepare_environment
from axon_dist.planner import read_step
from axon_dist.step import Claims, TrainStep
from axon_dist.train.loop import has_module

from ...core.own_context import in_own_context
from ..config import CONFIG, RunConfig, abstract_batch
from .directory import check_directory
from .runs import Run, build_run
from .steps import build_step, build_world
from .summary import attention_line, opening_lines, parameters_of, remat_line


@dataclasses.dataclass(frozen=True)
class Examination:
    """The report of a step and the machine it was compiled for.

    Args:
        report: memory, collectives and FLOPs per device.
        mesh: the axes and sizes.
        strategy: the name of the strategy.
        parameters: the number of all and of trained parameters, and the dtypes of frozen ones.
        target: the machine, or None for the devices of this machine.
        notes: sentences about which attention runs, which blocks are a loop, and what
            `remat: auto` recomputes; None if there is nothing to report.
        outer_steps: for replicas with outer steps (`diloco`, `local_sgd`), the report of the outer
            step of each fragment.
        every: the number of steps between synchronizations of a fragment; 0 for one replica.
    """

    report: Report
    mesh: MeshSpec
    strategy: str
    parameters: str
    target: Target | None
    notes: str | None = None
    outer_steps: tuple[Report, ...] = ()
    every: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the reports as plain values."""
        reports = [one.to_dict() for one in self.outer_steps]
        outer = {"outer_steps": reports, "every": self.every} if reports else {}
        return self.report.to_dict() | outer

    def outer_step_lines(self) -> list[str]:
        """Describes the bytes of each outer step and their sum; empty without outer steps."""
        sent = [one.collectives.by_link() for one in self.outer_steps]
        lines = [
            f"outer step of fragment {number}, every {self.every} steps: "
            f"{byte_size(links.get('slow', 0))} over slow links, "
            f"{byte_size(links.get('fast', 0))} over fast ones"
            for number, links in enumerate(sent)
        ]
        if lines:
            per_step = sum(links.get("slow", 0) for links in sent) // self.every
            lines.append(f"all of them: {byte_size(per_step)} a step over slow links")
        return lines


@in_own_context
@checked(config=CONFIG)
def examine(config: RunConfig, target: str | None = None) -> Examination:
    """Compiles the step that a config would train with, and reads the compiled program.

    Nothing is trained and no parameter is allocated. The batch is the config's global batch.

    Args:
        config: a checked run, as YAML describes it.
        target: a machine such as `"h100:8"` or `"v5p:2x2x2"`, which need not be present; None
            uses the config's own devices.

    Returns:
        The examination.

    Raises:
        MeshError: when the config's mesh does not fit the target.
        UnsupportedError: when the compiler for the target is not installed; it names the extra.
    """
    machine = None if target is None else parse_target(target)
    world = build_world(config) if machine is None else _target_world(config, machine)
    step = build_step(config, world)
    step_report = compiled_report(step, config)
    lines = attention_line(config, step), *map(str, step.loop_choices), remat_line(config, step)
    line = ". ".join(filter(None, lines)) or None
    parameters = parameters_of(step.model_spec)
    outer_steps = tuple(
        report(lowered.compile(), world.mesh) for lowered in lower_outer_steps(step)
    )
    outer_loop = step.strategy.outer_loop
    return Examination(
        step_report,
        world.spec,
        step.strategy.name,
        parameters,
        machine,
        line,
        outer_steps,
        0 if outer_loop is None else outer_loop.every,
    )


def _target_world(config: RunConfig, target: Target) -> World:
    prepare_environment(target)
    try:
        return World.init(config.mesh, target_devices(target))
    except MeshError as error:
        raise MeshError(f"{target.name}: {error}") from None


def compiled_report(step: TrainStep, config: RunConfig) -> Report:
    """Compiles a step for its config's batch, and compares its FLOPs with the traced ones."""
    batch = abstract_batch(config)
    compiled = step.lower(batch).compile()
    return report(compiled, step.world.mesh, traced_flops=read_step(step, batch).flops)


def program_record(run: Run) -> dict[str, Any]:
    """Compiles the step of a run, unless it is compiled already, and reads its costs.

    Args:
        run: the run; it is not changed.

    Returns:
        Plain data for JSON, among them `memory`, bytes per device by category; `collectives`, equal
        ones merged; `flops`; `leaves`, how every parameter is split and why; `mesh`; `schedule`,
        the table of a pipeline as CSV, or None; `warnings`, sentences about problems.
    """
    step_report = compiled_report(run.step, run.config)
    pipeline = run.step.strategy.pipeline
    table = None if pipeline is None else pipeline.schedule
    return {
        "strategy": run.step.strategy.name,
        "mesh": dict(run.world.mesh.shape),
        "devices": [
            {"rank": rank, "id": device.id, "process": device.process_index}
            for rank, device in enumerate(run.world.mesh.devices.flat)
        ],
        "chip": None if step_report.machine is None else step_report.machine.name,
        "chip_bytes": None if step_report.machine is None else step_report.machine.memory_bytes,
        "memory": memory_by_category(run, step_report),
        "peak_bytes": step_report.memory.peak,
        "warnings": step_report.warnings(),
        "flops": dataclasses.asdict(step_report.flops),
        "collectives": _combined(step_report.collectives.to_rows()),
        "wire_bytes_by_axis": step_report.collectives.by_axis(),
        "is_cpu": run.world.is_cpu,
        "leaves": _leaves(run.step.claims),
        "batch": {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for name, leaf in abstract_batch(run.config).items()
        },
        "schedule": None if table is None else {"name": table.name, "csv": table.to_csv()},
    }


def memory_by_category(run: Run, step_report: Report) -> dict[str, int]:
    """Splits the peak memory of the fullest device during a step into categories.

    Args:
        run: the run.
        step_report: the report of its compiled step.
    """
    state = run.step.state_layout.placed_shapes
    memory = step_report.memory
    kinds = {}
    for name, label in _KINDS.items():
        kinds[label] = own_bytes(getattr(state, name), run.world.is_cpu)
    # XLA:CPU counts arrays in host memory as `arguments`; others count them separately.
    rest = memory.arguments - sum(kinds.values())
    return {
        **{label: size for label, size in kinds.items() if size},
        "batch and padding": max(rest, 0),
        "gradients, activations and other temporaries": memory.temporaries,
        "outputs other than the state": max(memory.outputs - memory.aliased, 0),
    }


_KINDS: Mapping[str, str] = {
    "params": "parameters",
    "frozen": "frozen parameters",
    "opt_state": "optimizer state",
    "buffers": "buffers",
    "ema": "moving average",
    "outer": "outer parameters",
    "outer_state": "outer optimizer state",
}


def _combined(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merges collectives that differ only in their name into one row with a count."""
    total: Counter[str] = Counter()
    for row in rows:
        names = ("kind", "axis", "dtypes", "wire_bytes", "exposure", "source")
        total[json.dumps({name: row[name] for name in names})] += row["count"]
    merged = [{**json.loads(text), "count": count} for text, count in total.items()]
    return sorted(merged, key=lambda row: -row["wire_bytes"] * row["count"])


def _leaves(claims: Claims) -> list[dict[str, Any]]:
    return [
        {
            "path": row.path,
            "shape": list(row.shape),
            "dtype": row.dtype,
            "bytes": row.bytes,
            "bytes_per_device": row.bytes_per_device,
            "spec": str(row.spec),
            "why": row.decision.reason,
        }
        for group in (claims.params, claims.frozen)
        for row in group.rows
    ]


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The report of `dry_run`.

    Args:
        config: every value of the config, including defaults.
        opening: the lines that the run prints at its start.
        program: the result of `program_record`.
        items: the unit of throughput, such as tokens, and the number that the whole run processes.
        ranks: sentences about how ranks and processes share a global batch.
        files: the files that would be written, with their sizes where known.
    """

    config: dict[str, Any]
    opening: tuple[str, ...]
    program: dict[str, Any]
    items: tuple[str, int]
    ranks: tuple[str, ...]
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the report as lines for a terminal."""
        memory = self.program["memory"]
        width = max(map(len, memory))
        item, count = self.items
        chip = self.program["chip"]
        fits = f" of {byte_size(self.program['chip_bytes'])} of {chip}" if chip else ""
        return [
            *_differing(self.config),
            "---",
            *self.opening,
            f"{si(count)} {item} in total",
            *self.ranks,
            "memory per device, read from the compiled step:",
            *(f"  {label:<{width}}  {byte_size(size):>8}" for label, size in memory.items()),
            f"  {'in total':<{width}}  {byte_size(sum(memory.values())):>8}{fits}",
            *self.program["warnings"],
            "would write:",
            *(f"  {file}" for file in self.files),
            "dry run: nothing was trained and nothing was written",
        ]


def _differing(config: Mapping[str, object]) -> list[str]:
    """Lists the values of a config that are not defaults, and counts the defaults."""
    values, defaults = (
        flatten_dict(dict(one), sep=".", is_leaf=lambda _, value: not value)
        for one in (config, RunConfig().to_dict())
    )
    changed = {key: x for key, x in values.items() if key not in defaults or defaults[key] != x}
    unchanged = plural(len(values) - len(changed), "further key")
    return [
        *(f"{key} = {to_yaml(x, in_one_line=True)}"
          for key, x in changed.items()),
        f"{unchanged} with the default value: axon config --full lists all",
    ]  # fmt: skip


@in_own_context
@checked(config=CONFIG)
def dry_run(config: RunConfig) -> DryRun:
    """Builds and compiles everything a run needs, and reports what it would do; writes nothing.

    Args:
        config: a checked run, as YAML describes it.

    Returns:
        The report; print its `lines()`.

    Raises:
        AxonDistError: any error that a run would raise before its first step.
    """
    check_directory(config)
    run = build_run(config)
    run.check_weights()
    train = config.train
    return DryRun(
        config=config.to_dict(),
        opening=tuple(opening_lines(run)),
        program=program_record(run),
        items=(run.item, train.steps * run.items_per_step),
        ranks=tuple(_shares(run)),
        files=tuple(_files_of(config, run.step.abstract_state)),
    )


def _shares(run: Run) -> list[str]:
    """Describes how a global batch is divided over ranks and processes."""
    axes = run.step.strategy.batch_axes
    mesh = run.world.mesh
    rows = run.config.train.global_batch
    accumulate = run.config.train.accumulate
    index, count = run.world.share_of_batch(axes)
    own = run.world.own_batch_ranks(axes)
    is_one_part = len(run.world.parts_of_batch(axes)[0]) == 1
    of_ranks = "" if is_one_part else f", those of batch ranks {', '.join(map(str, own))}"
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    each = rows // ranks
    split = ""
    if accumulate > 1:
        split = f", in {plural(accumulate, 'microbatch')} of {each // accumulate}"
    return [
        f"each of {plural(ranks, 'batch rank')} ({', '.join(axes) or 'no axis'}) takes "
        f"{each} of {plural(rows, 'sample')} a step{split}",
        f"this process loads share {index + 1} of {count}: {rows // count} samples a step"
        f"{of_ranks}",
    ]


def _files_of(config: RunConfig, state: object) -> list[str]:
    path = as_place(config.run_dir or f"runs/{config.name}-<time>", "run_dir")
    checkpoint = config.checkpoint
    folder = as_place(checkpoint.dir, "checkpoint.dir") if checkpoint.dir else path / "checkpoints"
    size = num_bytes(state)
    when = f"every {checkpoint.every} steps and at the end" if checkpoint.every else "at the end"
    # As often as the run saves, and once more for a last step that is no multiple.
    saved = -(-config.train.steps // (checkpoint.every or config.train.steps))
    stays = plural(min(checkpoint.keep + checkpoint.best, saved), "stays", "stay")
    each = checkpoint.keep_every
    further = f", and each of a multiple of {plural(each, 'step')}" if each else ""
    named = ("config.yaml", "metrics.jsonl", "program.json", "summary.json")
    plot = ("loss.png",) if has_module("matplotlib") else ()
    return [
        *(str(path / name) for name in (*named, *plot)),
        *(str(one) for logger in config.loggers if (one := logger.path(path)) is not None),
        *_traces_of(config, path),
        f"{folder}{os.sep}step_…: {when}, {byte_size(size)} each, of which {stays}{further}",
    ]


def _traces_of(config: RunConfig, path: Place) -> list[str]:
    """Names the folder of traces and their steps; empty if none is planned."""
    profile = config.train.profile
    # 0 waits for a signal.
    if profile is None or not profile.at or profile.traces_nothing:
        return []
    # The first step compiles and is not traced.
    first, last = max(profile.at, 2), profile.at + profile.steps - 1
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return [f"{path / 'profile'}{os.sep}: a trace of {steps}"]
