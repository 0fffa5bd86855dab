"""What a strategy claims about the bytes on a device, and the check that it came true."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Group

from ..core.typing import PyTree
from ..parallel import Strategy
from ..sharding import Explanation, explain, explain_optimizer
from .spec import StepSpec
from .state import TrainState


@dataclasses.dataclass(frozen=True)
class Claims:
    """Where a strategy says that parameters, gradients and moments lie, and why; prints as tables.

    Args:
        params: about the parameters.
        grads: about the gradients that reach the optimizer: they lie with its moments.
        opt_state: about the optimizer state.
        frozen: about the frozen parameters, where there are some.
        programs: what a compiled step must show besides; each raises where it does not.
    """

    params: Explanation
    grads: Explanation
    opt_state: Explanation
    frozen: Explanation | None = None
    programs: tuple[Callable[[jax.stages.Compiled], Any], ...] = ()

    def of_program(self, *checks: Callable[[jax.stages.Compiled], Any]) -> Claims:
        """These claims, and what a compiled step must show besides.

        Args:
            checks: functions of the compiled step that raise, such as
                `functools.partial(axon_dist.inspect.expect_kernels, attention=24, remat=0)`.

        Returns:
            The claims; `check_compiled` checks them all.
        """
        return dataclasses.replace(self, programs=(*self.programs, *checks))

    def check(self, state: TrainState, grads: PyTree | None = None) -> None:
        """Raises unless every array is split as claimed.

        Args:
            state: arrays, whose shards are measured, or shapes with shardings.
            grads: gradients, where there are some.

        Raises:
            ClaimError: naming the leaves that a device holds more of.
        """
        self.params.check(state.params)
        self.opt_state.check(state.opt_state)
        if self.frozen is not None:
            self.frozen.check(state.frozen)
        if grads is not None:
            self.grads.check(grads)

    def check_compiled(self, compiled: jax.stages.Compiled, state: TrainState) -> None:
        """Raises unless a compiled step leaves its state split, and shows besides, as claimed.

        Args:
            compiled: from `TrainStep.lower(batch).compile()`.
            state: the shapes of the state.

        Raises:
            ClaimError: as `check`, and as what is claimed of the program says.
        """
        for check in self.programs:
            check(compiled)
        placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        self.check(jax.tree.map(placed, state, compiled.output_shardings[0]))

    def __rich__(self) -> Group:
        tables = [one.table() for one in (self.params, self.grads, self.opt_state)]
        return Group(*tables, *([] if self.frozen is None else [self.frozen.table()]))


def claims_of(spec: StepSpec, state: TrainState, strategy: Strategy | None = None) -> Claims:
    """The claims of a step's strategy about a state of given shapes.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        state: of shapes.
        strategy: lays it out; None is that of the storage.
    """
    strategy, mesh = strategy or spec.storage.strategy, spec.mesh
    return Claims(
        explain(strategy.params, state.params, mesh, f"parameters under {strategy.name}"),
        explain(strategy.opt_state, state.params, mesh, f"gradients under {strategy.name}"),
        explain_optimizer(
            strategy.opt_state,
            state.params,
            state.opt_state,
            mesh,
            f"optimizer state under {strategy.name}",
        ),
        explain(strategy.params, state.frozen, mesh, f"frozen parameters under {strategy.name}")
        if jax.tree.leaves(state.frozen)
        else None,
    )
