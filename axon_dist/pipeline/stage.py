"""A pipeline stage as three functions that know no schedule, and its backward passes.

A backward pass runs as one action, or is split into the input gradient and the weight gradient, as
zero-bubble schedules need it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import CALLS, REMATS, eval_equation, inner_programs
from ..core.typing import Array, PyTree
from ..ir.pieces import Piece, cut, unconstrained
from ..ir.walk import depends_on, interpret, needed_for, opened, struct_of


class Wire(NamedTuple):
    """The values that one stage sends to the next.

    Args:
        floats: activations, which have gradients.
        others: counts and flags, which have none.
        left: the new values of the stage's own buffers, for the next microbatch; they are not sent.
    """

    floats: list[Array]
    others: list[Array]
    left: Sequence[Array] = ()

    @property
    def sent(self) -> Wire:
        """The values without those of the stage's own buffers."""
        return Wire(self.floats, self.others)


class Data(NamedTuple):
    """The data of a microbatch that every rank has.

    Args:
        buffers: leaves of the model's buffers before the microbatch.
        batch: leaves of the microbatch.
        rows: the rows looked up for it in tables that are split over the ranks; only the first
            stage has them.
    """

    buffers: list[Array]
    batch: list[Array]
    rows: Sequence[Array] = ()


class StageLoss(NamedTuple):
    """The outputs of the loss function: a sum, its weight, and weighted means."""

    total: Array
    weight: Array
    metrics: list[Array]


Rest: TypeAlias = dict[int, Array]
"""Parameters outside the blocks, by their position among them."""


Weights: TypeAlias = Sequence[Sequence[Array]]
"""Parameters by row."""


class Frozen(NamedTuple):
    """The parameters that nothing is differentiated by.

    Args:
        weights: by row; () where all are trained.
        rest: those outside the blocks.
    """

    weights: Weights
    rest: Rest


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The program of some stages, which may be on several ranks.

    Args:
        stages: their numbers.
        chunk: the number of the chunk of its rank that each of them is.
        rows: the rows of parameters that they read.
        first: (rest, data) -> the input of stage 0.
        middle: (weights by row, rest, data, stage, input) -> output; `left` is by `learns`.
        last: (rest, data, output of the last stage) -> loss.
        first_uses: the rest parameters that `first` reads.
        middle_uses: those that `middle` reads.
        last_uses: those that `last` reads.
        learns: the numbers of the buffers in `left`, in their order, and the stage of each.
    """

    stages: tuple[int, ...]
    chunk: int
    rows: Sequence[int]
    first: Callable[[Rest, Data], Wire]
    middle: Callable[[Weights, Rest, Data, Array, Wire], Wire]
    last: Callable[[Rest, Data, Wire], StageLoss]
    first_uses: tuple[int, ...]
    middle_uses: tuple[int, ...]
    last_uses: tuple[int, ...]
    learns: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at(self, which: int, stage: Array, then: Callable, otherwise: Callable) -> Any:
        """Runs `then` at one stage and `otherwise` at others; by `lax.cond` where both occur."""
        if which not in self.stages:
            return otherwise()
        if self.stages == (which,):
            return then()
        laid = [lambda run=run: unconstrained(run()) for run in (then, otherwise)]
        return jax.lax.cond(stage == which, *laid)


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The program that computes the input of the first stage for one microbatch.

    The backward pass recomputes it, once per microbatch, instead of saving its residuals.

    Args:
        first: (rest, data) -> that input.
        trained: the parameters that it reads and that are trained.
        frozen: those that are not.
        data: of the microbatch.
    """

    first: Callable[[Rest, Data], Wire]
    trained: Rest
    frozen: Rest
    data: Data

    def back(self, rows: Sequence[Array], gradient: list[Array]) -> tuple[Rest, list[Array]]:
        """The gradients of the trained parameters and of the rows that were looked up.

        Args:
            rows: the rows looked up for the microbatch in tables that are split over the ranks.
            gradient: of the floats of the input.
        """

        def run(rest: Rest, rows: Sequence[Array]) -> list[Array]:
            return self.first({**rest, **self.frozen}, self.data._replace(rows=rows)).floats

        _, pull = jax.vjp(run, self.trained, rows)
        return pull(gradient)

    def reads_rows(self, rows: list[Array], gradient: list[Array]) -> bool:
        """Whether the backward pass reads the rows that were looked up, or only their gradient.

        The backward pass of a scale or a dropout after a lookup needs no rows; that of a norm does,
        and that of a projection whose weights are trained.

        Args:
            rows: arrays with the shapes of the rows.
            gradient: likewise of the floats of the input.
        """
        closed = jax.make_jaxpr(self.back)(rows, gradient)
        _, read = needed_for(closed.jaxpr, range(len(closed.jaxpr.outvars)))
        return any(number < len(rows) for number in read)


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""The operations whose weight gradients are delayed to `W`."""


class StageOperands(NamedTuple):
    """The operands of a stage, at which it is differentiated.

    Args:
        weights: by row.
        rest: the other parameters that the middle of the stage reads.
        data: buffers and leaves of one microbatch.
        stage: its number.
        wire: its input.
        frozen: the parameters that it is not differentiated by.
    """

    weights: Weights
    rest: Rest
    data: Data
    stage: Array
    wire: Wire
    frozen: Frozen = Frozen((), {})

    def run(self, program: StageProgram) -> Wire:
        """The output of a stage."""
        weights, rest = self.weights, {**self.rest, **self.frozen.rest}
        if self.frozen.weights:
            # In each row the trained leaves come first, then the frozen ones.
            rows = zip(weights, self.frozen.weights, strict=True)
            weights = [[*row, *other] for row, other in rows]
        return program.middle(weights, rest, self.data, self.stage, self.wire)


class Gradients(NamedTuple):
    """Gradients of a stage.

    Args:
        weights: like the weights.
        rest: like the rest.
        inputs: like the floats of the input.
    """

    weights: PyTree
    rest: PyTree
    inputs: list[Array]


def pull_back(
    program: StageProgram, at: StageOperands
) -> tuple[Wire, Callable[[list[Array]], Gradients]]:
    """Runs a stage, and returns its output and its VJP function."""

    def run(
        weights: Weights, rest: Rest, floats: list[Array]
    ) -> tuple[list[Array], tuple[list[Array], Sequence[Array]]]:
        wire = Wire(floats, at.wire.others)
        made = at._replace(weights=weights, rest=rest, wire=wire).run(program)
        return made.floats, (made.others, made.left)

    floats, pull, others = jax.vjp(run, at.weights, at.rest, at.wire.floats, has_aux=True)
    return Wire(floats, *others), lambda cotangents: Gradients(*pull(cotangents))


@dataclasses.dataclass(frozen=True, eq=False)
class DividedBackward:
    """The forward, the input gradient and the weight gradient of a stage, cut from one program.

    Nothing is computed twice: the second part is the backward slice of the input's gradient, the
    third computes the other gradients, and each part returns the values that a later one reads. In
    a chain of matrix products each part has one product per layer. The gradients of scales and
    biases are sums, and are computed in the second part, because they are smaller than the values
    that the third part would need for them. A value that does not depend on the microbatch, such as
    a cast weight, is recomputed instead of saved.

    Args:
        inputs: variables of operands and cotangents, in the order of `jax.tree.leaves`.
        forward_part: computes the output, and the residuals.
        input_part: computes the input gradient, and the intermediates, from the residuals.
        weight_part: computes the other gradients from the intermediates.
        residuals: the variables that the forward saves for the input gradient.
        intermediates: the variables that the input gradient saves for the weight gradient.
        consts: values of constants.
        trees: the structures of the output and of the gradients of (weights, rest).

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """

    inputs: list[Var]
    forward_part: Piece
    input_part: Piece
    weight_part: Piece
    residuals: list[Var]
    intermediates: list[Var]
    consts: dict[Var, Array]
    trees: tuple[PyTree, PyTree]

    @classmethod
    def of(
        cls,
        program: StageProgram,
        at: StageOperands,
        cotangents: list[Array],
        keeps_wire: bool = False,
    ) -> DividedBackward:
        """Divides the forward and backward passes of a stage.

        Args:
            program: of the stage; it is differentiated by its weights and its input.
            at: operands, arrays or shapes.
            cotangents: gradients of the floats of its output, arrays or shapes.
            keeps_wire: whether the input is saved with the residuals; else each part gets it, and
                the forward part runs right before the input gradient.

        Returns:
            The three parts.
        """
        if not keeps_wire:
            # A checkpointed block would run twice in one branch, and XLA would merge the two runs.
            program = dataclasses.replace(program, middle=_without_checkpoints(program.middle))

        def both_passes(at: StageOperands, cotangents: list[Array]) -> tuple[Wire, list, PyTree]:
            y, pull = pull_back(program, at)
            grads = pull(cotangents)
            return y, grads.inputs, (grads.weights, grads.rest)

        closed, shapes = jax.make_jaxpr(both_passes, return_shape=True)(at, cotangents)
        # Calls are inlined, because a `jit` or `checkpoint` around a pass would be one equation,
        # and belong to one part.
        flat = opened(closed, jax.tree.leaves((at, cotangents)))
        jaxpr, sizes = flat.jaxpr, [len(jax.tree.leaves(shape)) for shape in shapes]
        outputs = [jaxpr.outvars[: sizes[0]], jaxpr.outvars[sizes[0] :][: sizes[1]]]
        outputs.append(jaxpr.outvars[sizes[0] + sizes[1] :])
        inputs = jaxpr.invars[: len(jax.tree.leaves(at))]
        seeds = jaxpr.invars[len(inputs) :]
        # The last operands are the frozen weights, which do not depend on the microbatch either.
        inputs = inputs[: len(inputs) - len(jax.tree.leaves(at.frozen))]
        wire = inputs[len(inputs) - len(jax.tree.leaves(at.wire)) :] if keeps_wire else []
        # Only values that depend on the microbatch are saved from part to part; those of weights
        # alone are cheaper to recompute than to save for every microbatch in flight.
        varying = depends_on(jaxpr, inputs[len(jax.tree.leaves((at.weights, at.rest))) :] + seeds)
        made = {*wire}
        parts: list[Piece] = []
        for number, part in enumerate(outputs):
            piece = cut(jaxpr, part, known=made)
            if number == 1:
                # Gradients of scales and biases are sums over values that are live in I. In W they
                # would need these values, larger than the gradients, to be saved until then.
                sums = _light(jaxpr, outputs[2], made | varying & piece.made, varying)
                also = cut(jaxpr, [*part, *sums], known=made)
                piece = dataclasses.replace(also, outputs=piece.outputs)
            parts.append(piece)
            made |= varying & piece.made
        # Sets have no order, and the parts of all ranks must agree on one.
        order = [*wire, *seeds, *(v for e in jaxpr.eqns for v in e.outvars)]
        later = parts[1].needs | parts[2].needs
        of_forward = {*wire, *parts[0].made} & made
        residuals = [v for v in order if v in of_forward and v in later]
        intermediates = [v for v in order if v in made | set(seeds) and v in parts[2].needs]
        return cls(
            inputs=list(jaxpr.invars),
            forward_part=_with_outputs(parts[0], residuals),
            input_part=_with_outputs(parts[1], intermediates),
            weight_part=parts[2],
            residuals=residuals,
            intermediates=intermediates,
            consts=dict(zip(jaxpr.constvars, flat.consts, strict=True)),
            trees=(jax.tree.structure(shapes[0]), jax.tree.structure(shapes[2])),
        )

    def shapes(self, of: list[Var]) -> list[jax.ShapeDtypeStruct]:
        """The shapes of some variables, such as `residuals` or `intermediates`."""
        return [struct_of(v) for v in of]

    def forward(self, at: StageOperands) -> tuple[Wire, list[Array]]:
        """Runs the stage; returns its output and the residuals."""
        results = self.forward_part.run(self._known(at))
        count = len(results) - len(self.residuals)
        return jax.tree.unflatten(self.trees[0], results[:count]), results[count:]

    def input_gradient(
        self, at: StageOperands, residuals: list[Array], cotangents: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Returns the gradient of the input, and the intermediates for the weight gradient."""
        known = self._known(at, cotangents) | dict(zip(self.residuals, residuals, strict=True))
        results = self.input_part.run(known)
        count = len(results) - len(self.intermediates)
        return results[:count], results[count:]

    def weight_gradient(self, at: StageOperands, values: list[Array]) -> tuple[PyTree, PyTree]:
        """Returns the gradients of weights and rest."""
        known = self._known(at) | dict(zip(self.intermediates, values, strict=True))
        return jax.tree.unflatten(self.trees[1], self.weight_part.run(known))

    def _known(self, at: StageOperands, cotangents: list[Array] | None = None) -> dict[Var, Array]:
        values = jax.tree.leaves((at, cotangents or []))
        return self.consts | dict(zip(self.inputs, values, strict=False))


def _without_checkpoints(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function without its checkpoints."""

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

        def enters(equation: JaxprEqn) -> bool:
            return equation.primitive.name in CALLS | REMATS

        values = jax.tree.leaves(args)
        outputs = interpret(closed.jaxpr, closed.consts, values, eval_equation, enters=enters)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def _light(
    jaxpr: Jaxpr, gradients: Sequence[Var | Literal], known: set[Var], varying: set[Var]
) -> list[Var]:
    """The gradients that need no product, and that are smaller than their operands."""
    light = []
    for gradient in (v for v in gradients if not isinstance(v, Literal)):
        piece = cut(jaxpr, [gradient], known=known)
        operands = sum(math.prod(struct_of(v).shape) for v in piece.needs & varying)
        size = math.prod(struct_of(gradient).shape)
        # A product, or what runs a program that may hold one.
        has_product = any(
            equation.primitive.name in PRODUCTS or any(True for _ in inner_programs(equation))
            for equation in piece.equations
        )
        if size < operands and not has_product:
            light.append(gradient)
    return light


def _with_outputs(piece: Piece, more: list[Var]) -> Piece:
    """A piece that also returns values that it computes or reads."""
    return dataclasses.replace(
        piece, outputs=(*piece.outputs, *more), needs=piece.needs | (set(more) - piece.made)
    )
