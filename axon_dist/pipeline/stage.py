"""A pipeline stage as three functions, independent of the schedule, and its backward passes.

A backward pass runs as one action, or is split into the input gradient and the weight gradient, as
zero-bubble schedules require.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import CALLS, REMATS, eval_equation, inner_programs
from ..core.typing import Array, PyTree
from ..ir.pieces import Piece, backward_slice, unconstrained
from ..ir.walk import depends_on, interpret, needed_for, opened, struct_of


class Wire(NamedTuple):
    """The values that a stage returns; `sent` are those that the next stage gets.

    Args:
        floats: activations, which have gradients.
        others: counts and flags, which have none.
        new_buffers: the new values of the stage's own buffers, for the next microbatch; not sent.
    """

    floats: list[Array]
    others: list[Array]
    new_buffers: Sequence[Array] = ()

    @property
    def sent(self) -> Wire:
        """The wire without the stage's own buffers."""
        return Wire(self.floats, self.others)


class MicrobatchData(NamedTuple):
    """The data of a microbatch; every rank has all of it but `looked_up`.

    Args:
        buffers: leaves of the model's buffers before the microbatch.
        batch: leaves of the microbatch.
        looked_up: the rows of split tables that were looked up for the microbatch, on the first
            stage; empty on others.
    """

    buffers: list[Array]
    batch: list[Array]
    looked_up: Sequence[Array] = ()


class StageLoss(NamedTuple):
    """The outputs of the loss function: a total, its weight, and the metrics to add up."""

    total: Array
    weight: Array
    metrics: list[Array]


Rest: TypeAlias = dict[int, Array]
"""Parameters outside the blocks, each by its position in the list of all of them."""


Weights: TypeAlias = Sequence[Sequence[Array]]
"""Parameters by row."""


class Frozen(NamedTuple):
    """The parameters that get no gradient.

    Args:
        weights: by row; () if all are trained.
        rest: the frozen parameters outside the blocks.
    """

    weights: Weights
    rest: Rest


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The program of one or several stages, which may be on different ranks.

    Args:
        stages: the numbers of the stages.
        chunk: which chunk of its rank each of these stages is.
        rows: the rows of parameters that the stages read.
        first: (rest, data) -> the input of stage 0.
        middle: (weights by row, rest, data, stage, input) -> output.
        last: (rest, data, output of the last stage) -> loss.
        first_uses: the numbers of the parameters in `rest` that `first` reads.
        middle_uses: the numbers of those that `middle` reads.
        last_uses: the numbers of those that `last` reads.
        buffer_stages: the stage that updates each buffer, by the buffer's number, in the order of
            `Wire.new_buffers` in the output of `middle`.
    """

    stages: tuple[int, ...]
    chunk: int
    rows: Sequence[int]
    first: Callable[[Rest, MicrobatchData], Wire]
    middle: Callable[[Weights, Rest, MicrobatchData, Array, Wire], Wire]
    last: Callable[[Rest, MicrobatchData, Wire], StageLoss]
    first_uses: tuple[int, ...]
    middle_uses: tuple[int, ...]
    last_uses: tuple[int, ...]
    buffer_stages: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at_stage(self, which: int, stage: Array, then: Callable, otherwise: Callable) -> Any:
        """Runs `then` at one stage and `otherwise` at others, with `lax.cond` if both occur."""
        if which not in self.stages:
            return otherwise()
        if self.stages == (which,):
            return then()
        branches = [lambda run=run: unconstrained(run()) for run in (then, otherwise)]
        return jax.lax.cond(stage == which, *branches)


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The program that computes the input of the first stage for one microbatch.

    The backward pass recomputes it once per microbatch, instead of saving its residuals.

    Args:
        first: (rest, data) -> the input.
        trained: the trained parameters that it reads.
        frozen: the frozen parameters that it reads.
        data: the data of the microbatch.
    """

    first: Callable[[Rest, MicrobatchData], Wire]
    trained: Rest
    frozen: Rest
    data: MicrobatchData

    def back(self, looked_up: Sequence[Array], gradient: list[Array]) -> tuple[Rest, list[Array]]:
        """Returns the gradients of the trained parameters and of the rows that were looked up.

        Args:
            looked_up: the rows of split tables that were looked up for the microbatch.
            gradient: the gradient of the floats of the input.
        """

        def run(rest: Rest, looked_up: Sequence[Array]) -> list[Array]:
            data = self.data._replace(looked_up=looked_up)
            return self.first({**rest, **self.frozen}, data).floats

        _, pull = jax.vjp(run, self.trained, looked_up)
        return pull(gradient)

    def reads_looked_up(self, looked_up: list[Array], gradient: list[Array]) -> bool:
        """Whether the backward pass reads the rows that were looked up, or only their gradient.

        After a lookup, the backward pass of a scale or a dropout does not need the rows. That of a
        norm, or of a projection with trained weights, does.

        Args:
            looked_up: arrays with the shapes of the rows.
            gradient: arrays with the shapes of the floats of the input.
        """
        closed = jax.make_jaxpr(self.back)(looked_up, gradient)
        _, read = needed_for(closed.jaxpr, range(len(closed.jaxpr.outvars)))
        return any(number < len(looked_up) for number in read)


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""The primitives of products. Weight gradients that need one of these always wait for `W`."""


class StageOperands(NamedTuple):
    """The operands at which a stage is run and differentiated.

    Args:
        weights: by row.
        rest: the other parameters that the middle of the stage reads.
        data: buffers and leaves of one microbatch.
        stage: the number of the stage.
        wire: the input of the stage.
        frozen: the parameters that get no gradient.
    """

    weights: Weights
    rest: Rest
    data: MicrobatchData
    stage: Array
    wire: Wire
    frozen: Frozen = Frozen((), {})

    def run(self, program: StageProgram) -> Wire:
        """Runs the stage and returns its output."""
        weights = self.weights
        rest = {**self.rest, **self.frozen.rest}
        if self.frozen.weights:
            # In each row the trained leaves come first, then the frozen ones.
            rows = zip(weights, self.frozen.weights, strict=True)
            weights = [[*row, *frozen_row] for row, frozen_row in rows]
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
    program: StageProgram, operands: StageOperands
) -> tuple[Wire, Callable[[list[Array]], Gradients]]:
    """Runs a stage and returns its output and its VJP function."""

    def run(
        weights: Weights, rest: Rest, floats: list[Array]
    ) -> tuple[list[Array], tuple[list[Array], Sequence[Array]]]:
        wire = Wire(floats, operands.wire.others)
        made = operands._replace(weights=weights, rest=rest, wire=wire).run(program)
        return made.floats, (made.others, made.new_buffers)

    floats, pull, others = jax.vjp(
        run, operands.weights, operands.rest, operands.wire.floats, has_aux=True
    )
    return Wire(floats, *others), lambda cotangents: Gradients(*pull(cotangents))


@dataclasses.dataclass(frozen=True, eq=False)
class StagePasses:
    """The forward, the input gradient and the weight gradient of a stage, cut from one program.

    Nothing that depends on the microbatch is computed twice. The second part is the backward slice
    of the input's gradient, the third computes the other gradients, and each part returns the
    values that later parts read. In a chain of matrix products each part has one product per layer.
    The gradients of scales and biases are sums. They are computed in the second part, because they
    are smaller than the values that the third part would need for them. A value that does not
    depend on the microbatch, such as a cast weight, is recomputed instead of saved.

    Args:
        inputs: the variables of operands and cotangents, in the order of `jax.tree.leaves`.
        forward_part: computes the output and the residuals.
        input_part: computes the input gradient and the intermediates from the residuals.
        weight_part: computes the other gradients from the intermediates.
        residuals: the variables that the forward saves for the input gradient.
        intermediates: the variables that the input gradient saves for the weight gradient.
        consts: the values of constants.
        trees: the tree structures of the output and of the gradients of (weights, rest).

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
        operands: StageOperands,
        cotangents: list[Array],
        saves_residuals: bool = False,
    ) -> StagePasses:
        """Divides the forward and backward passes of a stage.

        Args:
            program: the program of the stage, differentiated with respect to its weights and input.
            operands: those of the stage, arrays or shapes.
            cotangents: the gradients of the floats of its output, arrays or shapes.
            saves_residuals: whether residuals, the input among them, are saved from the forward to
                the backward pass. Otherwise each part receives the input as an operand, and the
                forward part runs right before the input gradient.

        Returns:
            The three parts.
        """
        if not saves_residuals:
            # The forward part and the input gradient run in one branch. There XLA merges the second
            # run of a checkpointed block with the first, so a checkpoint would save no memory.
            program = dataclasses.replace(program, middle=_without_checkpoints(program.middle))

        def both_passes(
            operands: StageOperands, cotangents: list[Array]
        ) -> tuple[Wire, list, PyTree]:
            y, pull = pull_back(program, operands)
            grads = pull(cotangents)
            return y, grads.inputs, (grads.weights, grads.rest)

        closed, shapes = jax.make_jaxpr(both_passes, return_shape=True)(operands, cotangents)
        # Calls are inlined, because a `jit` or `checkpoint` would otherwise be one equation, which
        # could not be divided between parts.
        flat = opened(closed, jax.tree.leaves((operands, cotangents)))
        jaxpr = flat.jaxpr
        ends = [0, *accumulate(len(jax.tree.leaves(shape)) for shape in shapes)]
        outputs = [jaxpr.outvars[start:end] for start, end in pairwise(ends)]
        inputs = jaxpr.invars[: len(jax.tree.leaves(operands))]
        seeds = jaxpr.invars[len(inputs) :]
        # Drop the last operands, the frozen weights: they do not depend on the microbatch.
        inputs = inputs[: len(inputs) - len(jax.tree.leaves(operands.frozen))]
        wire = (
            inputs[len(inputs) - len(jax.tree.leaves(operands.wire)) :] if saves_residuals else []
        )
        # Only values that depend on the microbatch are saved from part to part. Values of weights
        # alone are cheaper to recompute than to save for every microbatch in flight.
        varying = depends_on(
            jaxpr, inputs[len(jax.tree.leaves((operands.weights, operands.rest))) :] + seeds
        )
        made = {*wire}
        parts: list[Piece] = []
        for number, part in enumerate(outputs):
            piece = backward_slice(jaxpr, part, known=made)
            if number == 1:
                # Gradients of scales and biases are sums over values that are live in I. Computed
                # in W, they would need these values, which are larger, to be saved until then.
                sums = _small_sums(jaxpr, outputs[2], made | varying & piece.made, varying)
                also = backward_slice(jaxpr, [*part, *sums], known=made)
                piece = dataclasses.replace(also, outputs=piece.outputs)
            parts.append(piece)
            made |= varying & piece.made
        # Sets have no order, but the parts of all ranks must agree on one.
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
        """Returns the shapes of some variables, such as `residuals` or `intermediates`."""
        return [struct_of(v) for v in of]

    def forward(self, operands: StageOperands) -> tuple[Wire, list[Array]]:
        """Runs the stage and returns its output and the residuals."""
        results = self.forward_part.run(self._known(operands))
        count = len(results) - len(self.residuals)
        return jax.tree.unflatten(self.trees[0], results[:count]), results[count:]

    def input_gradient(
        self, operands: StageOperands, residuals: list[Array], cotangents: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Returns the gradient of the input and the intermediates for the weight gradient."""
        known = self._known(operands, cotangents) | dict(
            zip(self.residuals, residuals, strict=True)
        )
        results = self.input_part.run(known)
        count = len(results) - len(self.intermediates)
        return results[:count], results[count:]

    def weight_gradient(
        self, operands: StageOperands, values: list[Array]
    ) -> tuple[PyTree, PyTree]:
        """Returns the gradients of the weights and of `rest`."""
        known = self._known(operands) | dict(zip(self.intermediates, values, strict=True))
        return jax.tree.unflatten(self.trees[1], self.weight_part.run(known))

    def _known(
        self, operands: StageOperands, cotangents: list[Array] | None = None
    ) -> dict[Var, Array]:
        values = jax.tree.leaves((operands, cotangents or []))
        return self.consts | dict(zip(self.inputs, values, strict=False))


def _without_checkpoints(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the function with its calls and checkpoints inlined."""

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

        def enters(equation: JaxprEqn) -> bool:
            return equation.primitive.name in CALLS | REMATS

        values = jax.tree.leaves(args)
        outputs = interpret(closed.jaxpr, closed.consts, values, eval_equation, enters=enters)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def _small_sums(
    jaxpr: Jaxpr, gradients: Sequence[Var | Literal], known: set[Var], varying: set[Var]
) -> list[Var]:
    """Returns the gradients that need no product and are smaller than their operands."""
    found = []
    for gradient in (v for v in gradients if not isinstance(v, Literal)):
        piece = backward_slice(jaxpr, [gradient], known=known)
        operands = sum(math.prod(struct_of(v).shape) for v in piece.needs & varying)
        size = math.prod(struct_of(gradient).shape)
        # A product, or an equation with an inner program, which may contain one.
        has_product = any(
            equation.primitive.name in PRODUCTS or any(True for _ in inner_programs(equation))
            for equation in piece.equations
        )
        if size < operands and not has_product:
            found.append(gradient)
    return found


def _with_outputs(piece: Piece, more: list[Var]) -> Piece:
    """Returns the piece with more outputs, values that it computes or reads."""
    return dataclasses.replace(
        piece, outputs=(*piece.outputs, *more), needs=piece.needs | (set(more) - piece.made)
    )
