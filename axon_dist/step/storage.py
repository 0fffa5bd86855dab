"""How a state holds the parameters: as the model does, or in rows for the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ..core.errors import UnsupportedError
from ..core.typing import Path, PyTree
from ..parallel import PipelinePlan, Strategy
from ..pipeline import Keys, ModelStorage, Staged, Stages, storage_for
from ..schedule import partition
from .parts import ModelParts

CONTAINERS = (nnx.List, nnx.Dict)
"""Modules that nobody calls: they only hold others."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The stored form of parameters, and the strategy that lays it out.

    Args:
        strategy: policies about stored leaves.
        from_model: the model's nested dict -> the stored tree.
        to_model: the inverse, exactly.
        rows: the rows of a pipeline; None without one.
    """

    strategy: Strategy
    from_model: Callable[[PyTree], PyTree] = lambda params: params
    to_model: Callable[[PyTree], PyTree] = lambda params: params
    rows: ModelStorage | None = None

    def with_state_rows(self, paths: frozenset[Path]) -> Storage:
        """The same, knowing which leaves of the optimizer's state are rows."""
        policy: Any = self.strategy.opt_state
        policy = dataclasses.replace(policy, state_rows=paths)
        return dataclasses.replace(
            self, strategy=dataclasses.replace(self.strategy, opt_state=policy)
        )


def storage_of(parts: ModelParts, strategy: Strategy) -> Storage:
    """The storage that a strategy needs.

    Args:
        parts: the model.
        strategy: its pipeline cuts the model; without one the state holds the model's own dict.

    Returns:
        The storage.

    Raises:
        UnsupportedError: when the model has no blocks to cut between, or they differ.
        ScheduleError: when there are fewer blocks than stages, or the boundaries do not fit.
    """
    if strategy.pipeline is None:
        return Storage(strategy)
    rows = storage_for(_stages(parts, strategy.pipeline), parts.params)
    stored = jax.eval_shape(rows.from_model, parts.params)
    return Storage(_staged(strategy, rows, stored), rows.from_model, rows.to_model, rows)


def _stages(parts: ModelParts, plan: PipelinePlan) -> Stages:
    model = nnx.merge(parts.graphdef, parts.params, parts.buffers)
    blocks = block_keys(model, plan.classes)
    if len(blocks) < plan.schedule.num_stages:
        classes = sorted({type(module).__name__ for _, module in nnx.iter_modules(model)})
        raise UnsupportedError(
            f"the pipeline has {plan.schedule.num_stages} stages, and the model has {len(blocks)} "
            f"blocks to cut between ({', '.join(plan.classes) or 'modules kept in lists'}). Use "
            f"fewer stages, name the class of the blocks among {', '.join(classes)}, or give each "
            "stage its module: Pipeline.from_modules([...])"
        )
    boundaries = partition(len(blocks), plan.schedule.num_stages, plan.costs, plan.boundaries)
    return Stages.of(plan.schedule, tuple(blocks), boundaries)


def block_keys(model: nnx.Module, classes: tuple[str, ...] = ()) -> list[Keys]:
    """The keys of the modules that a pipeline may cut between, in the order of the model.

    Args:
        model: a model.
        classes: names of the block classes; none takes the modules that the model keeps in lists
            and that have parameters; of lists in lists, the modules in the innermost ones.

    Returns:
        Keys, nothing inside a block being one.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> block_keys(model)
        [('layers', 0)]
    """
    found: list[Keys] = []
    for keys, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        # A list in a list only holds blocks; what a block holds in lists is found after the block.
        listed = bool(keys) and isinstance(keys[-1], int) and not isinstance(module, CONTAINERS)
        chosen = type(module).__name__ in classes if classes else listed and _has_params(module)
        if chosen and not any(keys[: len(outer)] == outer for outer in found):
            found.append(keys)
    return sorted(found, key=lambda keys: [_counted(key) for key in keys])


def _counted(key: str | int) -> tuple[bool, list[str | int]]:
    """Sorts names by the numbers in them: `layer_2` stands before `layer_10`."""
    parts = re.split(r"(\d+)", str(key))
    return isinstance(key, str), [int(part) if part.isdigit() else part for part in parts]


def _has_params(module: nnx.Module) -> bool:
    return bool(jax.tree.leaves(nnx.state(module, nnx.Param)))


def _staged(strategy: Strategy, rows: ModelStorage, stored: PyTree) -> Strategy:
    plan: Any = strategy.pipeline
    of_rows = frozenset("/".join(map(str, keys)) for keys in rows.row_keys)
    wrap = lambda policy: Staged(policy, plan.axis, of_rows)
    return dataclasses.replace(
        strategy,
        params=wrap(strategy.params),
        grads=wrap(strategy.grads),
        opt_state=wrap(strategy.opt_state),
    )
