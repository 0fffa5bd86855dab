"""What a run's compiled step is made of, as plain data: read once, so that no device is needed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from axon_dist.inspect import Report, report
from axon_dist.sharding import Explanation

from ..config.build import Run, abstract_batch


def read_program(run: Run) -> dict[str, Any]:
    """Compiles the step of a run, if that is not done yet, and reads what it costs.

    Args:
        run: its parts; nothing of it is changed.

    Returns:
        What JSON can hold: `memory`, bytes per device by category; `collectives`, equal ones
        joined; `flops`; `leaves`, where every parameter lies and why; `mesh`; `schedule`, the
        table of a pipeline as CSV, or None.
    """
    compiled = run.step.lower(abstract_batch(run.config)).compile()
    found = report(compiled, run.world.mesh)
    plan = run.step.strategy.pipeline
    return {
        "strategy": run.step.strategy.name,
        "mesh": dict(run.world.mesh.shape),
        "devices": [_device(rank, d) for rank, d in enumerate(run.world.mesh.devices.flat)],
        "chip": None if found.machine is None else found.machine.name,
        "chip_bytes": None if found.machine is None else found.machine.memory_bytes,
        "memory": memory_by_category(run, found),
        "peak_bytes": found.memory.peak,
        "flops": dataclasses.asdict(found.flops),
        "collectives": _joined(found.collectives.to_rows()),
        "wire_bytes_by_axis": found.collectives.by_axis(),
        "is_cpu": run.world.is_cpu,
        "leaves": _leaves(run.step.claims.params, run.step.claims.frozen),
        "batch": {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for name, leaf in abstract_batch(run.config).items()
        },
        "schedule": None if plan is None else _schedule(plan.schedule),
    }


def memory_by_category(run: Run, found: Report) -> dict[str, int]:
    """Bytes on the fullest device while a step runs, by what they are; the sum is the peak.

    Args:
        run: its parts.
        found: the report of its compiled step.
    """
    state, places = run.step.abstract_state, run.step.state_shardings
    memory, kinds = found.memory, {}
    for name, label in _KINDS.items():
        kinds[label] = _bytes(getattr(state, name), getattr(places, name))
    rest = memory.arguments + memory.host_arguments - sum(kinds.values())
    return {
        **{label: size for label, size in kinds.items() if size},
        "batch and padding": max(rest, 0),
        "gradients, activations and other temporaries": memory.temporaries,
        "outputs beside the state": max(memory.outputs - memory.aliased, 0),
    }


_KINDS: Mapping[str, str] = {
    "params": "parameters",
    "frozen": "frozen parameters",
    "opt_state": "optimizer state",
    "buffers": "buffers",
    "ema": "moving average",
    "outer": "outer parameters",
    "meeting": "outer optimizer state",
}


def _bytes(shapes: Any, places: Any) -> int:
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
    return sum(math.prod(p.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, p in pairs)


def _device(rank: int, device: Any) -> dict[str, Any]:
    return {"rank": rank, "id": device.id, "process": device.process_index}


def _joined(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Collectives that differ in nothing but their name, as one row with a count."""
    total: Counter[str] = Counter()
    for row in rows:
        names = ("kind", "axis", "dtypes", "wire_bytes", "exposure", "source")
        total[json.dumps({name: row[name] for name in names})] += row["count"]
    joined = [{**json.loads(text), "count": count} for text, count in total.items()]
    return sorted(joined, key=lambda row: -row["wire_bytes"] * row["count"])


def _leaves(*explanations: Explanation | None) -> list[dict[str, Any]]:
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
        for found in explanations
        if found is not None
        for row in found.rows
    ]


def _schedule(table: Any) -> dict[str, str]:
    return {"name": table.name, "csv": table.to_csv()}
