"""A stage as three functions, with nothing of schedules in them, and its backward passes.

A backward pass runs whole, or split into input gradients and weight gradients.
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
from ..jaxpr.pieces import Piece, as_it_lies, cut
from ..jaxpr.walk import depends_on, interpret, needed_for, opened, struct_of


class Wire(NamedTuple):
    """What one stage passes to the next.

    Args:
        floats: activations, which have gradients.
        others: counts and flags, which have none.
        left: what a stage leaves in its own buffers for the next microbatch; it is not passed on.
    """

    floats: list[Array]
    others: list[Array]
    left: Sequence[Array] = ()

    @property
    def sent(self) -> Wire:
        """What is passed on."""
        return Wire(self.floats, self.others)


class Data(NamedTuple):
    """What every rank knows about a microbatch.

    Args:
        buffers: leaves of the model's buffers before the microbatch.
        batch: leaves of the microbatch.
        rows: what was looked up for it in tables that lie in parts over the ranks; only the first
            stage knows it.
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
    """The stages that run the same program, on whatever ranks they are.

    Args:
        stages: which.
        chunk: which of its rank's chunks each is.
        rows: the rows of parameters they use.
        first: (rest, data) -> the input of stage 0.
        middle: (weights by row, rest, data, stage, input) -> output; `left` is by `learns`.
        last: (rest, data, output of the last stage) -> loss.
        first_uses: the rest parameters that `first` reads.
        middle_uses: those that `middle` reads.
        last_uses: those that `last` reads.
        learns: the numbers of the buffers that `middle` leaves, in their order, and the stage that
            each is of.
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
        """Runs `then` at one stage and `otherwise` at others; a branch where both can happen."""
        if which not in self.stages:
            return otherwise()
        if self.stages == (which,):
            return then()
        laid = [lambda run=run: as_it_lies(run()) for run in (then, otherwise)]
        return jax.lax.cond(stage == which, *laid)


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The program that makes the input of the first stage, of one microbatch.

    It is run again on the way back, once per microbatch, instead of kept.

    Args:
        first: (rest, data) -> that input.
        trained: the parameters that it reads and that are trained.
        frozen: those that are not.
        data: what is known of the microbatch.
    """

    first: Callable[[Rest, Data], Wire]
    trained: Rest
    frozen: Rest
    data: Data

    def back(self, rows: Sequence[Array], gradient: list[Array]) -> tuple[Rest, list[Array]]:
        """The gradients of the trained parameters and of what was looked up.

        Args:
            rows: what was looked up for the microbatch in tables that lie in parts.
            gradient: of the floats of the input.
        """

        def run(rest: Rest, rows: Sequence[Array]) -> list[Array]:
            return self.first({**rest, **self.frozen}, self.data._replace(rows=rows)).floats

        _, pull = jax.vjp(run, self.trained, rows)
        return pull(gradient)

    def reads_rows(self, rows: list[Array], gradient: list[Array]) -> bool:
        """Whether the way back depends on what was looked up, and not only on its gradient.

        A scale or a dropout behind a lookup needs no rows on the way back; a norm does, and a
        projection whose weights are trained.

        Args:
            rows: arrays of the shapes of what is looked up.
            gradient: likewise of the floats of the input.
        """
        closed = jax.make_jaxpr(self.back)(rows, gradient)
        _, read = needed_for(closed.jaxpr, range(len(closed.jaxpr.outvars)))
        return any(number < len(rows) for number in read)


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""What weight gradients are put off for."""


class StageOperands(NamedTuple):
    """What a stage is differentiated at.

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
            # Of each row what is trained, and behind it the others.
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
    """Runs a stage, and returns its output and the function from its gradient to all others."""

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
    """Forward, input gradient and weight gradient of a stage: three cuts of one program.

    Nothing is computed twice: the second part is what leads from the forward to the gradient of
    the input, the third is the rest, and values that a later part needs are handed over. In a chain
    of matrix products each part is one product per layer. Gradients of scales and biases, mere
    sums, are made with the second part, since they are smaller than what they would need later.
    What does not depend on the microbatch, such as a weight in another dtype, is made anew instead
    of being kept.

    Args:
        inputs: variables of operands and cotangents, in the order of `jax.tree.leaves`.
        forward_part: computes the output, and `kept`.
        input_part: computes the input gradient, and `held`, from `kept`.
        weight_part: computes the other gradients from `held`.
        kept: the variables that the forward hands over.
        held: the variables that the input gradient hands over.
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
            program: what the stage computes, for whose weights and inputs gradients are made.
            at: operands, arrays or shapes.
            cotangents: gradients of the floats of its output, arrays or shapes.
            keeps_wire: whether the input, too, is handed over; else it is given to each part, and
                the forward part runs right before the input gradient.

        Returns:
            The three parts.
        """
        if not keeps_wire:
            # Blocks that are recomputed would be run twice in one branch, which XLA undoes.
            program = dataclasses.replace(program, middle=_without_checkpoints(program.middle))

        def both_passes(at: StageOperands, cotangents: list[Array]) -> tuple[Wire, list, PyTree]:
            y, pull = pull_back(program, at)
            grads = pull(cotangents)
            return y, grads.inputs, (grads.weights, grads.rest)

        closed, shapes = jax.make_jaxpr(both_passes, return_shape=True)(at, cotangents)
        # Written out, because a `jit` or `checkpoint` around a pass would be one equation, and
        # whole in one part.
        flat = opened(closed, jax.tree.leaves((at, cotangents)))
        jaxpr, sizes = flat.jaxpr, [len(jax.tree.leaves(shape)) for shape in shapes]
        outputs = [jaxpr.outvars[: sizes[0]], jaxpr.outvars[sizes[0] :][: sizes[1]]]
        outputs.append(jaxpr.outvars[sizes[0] + sizes[1] :])
        inputs = jaxpr.invars[: len(jax.tree.leaves(at))]
        seeds = jaxpr.invars[len(inputs) :]
        # Behind everything else stand the frozen weights, which follow from no microbatch either.
        inputs = inputs[: len(inputs) - len(jax.tree.leaves(at.frozen))]
        wire = inputs[len(inputs) - len(jax.tree.leaves(at.wire)) :] if keeps_wire else []
        # Only what depends on the microbatch is handed from part to part; what follows from weights
        # alone is cheaper to make again than to keep for every microbatch in flight.
        varying = depends_on(jaxpr, inputs[len(jax.tree.leaves((at.weights, at.rest))) :] + seeds)
        made = {*wire}
        parts: list[Piece] = []
        for number, part in enumerate(outputs):
            piece = cut(jaxpr, part, known=made)
            if number == 1:
                # Gradients of scales and biases are sums over values that I has at hand. Left to W,
                # those values, larger than the gradients, would be held until then.
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
        """The shapes of what is handed over: of `kept` or `held`."""
        return [struct_of(v) for v in of]

    def forward(self, at: StageOperands) -> tuple[Wire, list[Array]]:
        """Runs the stage; returns its output and what it keeps."""
        results = self.forward_part.run(self._known(at))
        count = len(results) - len(self.residuals)
        return jax.tree.unflatten(self.trees[0], results[:count]), results[count:]

    def input_gradient(
        self, at: StageOperands, residuals: list[Array], cotangents: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Returns the gradient of the input, and what the weight gradient needs of it."""
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
    """The gradients that no product leads to, and that are smaller than what leads to them."""
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
    """A piece that also returns values it makes or is given."""
    return dataclasses.replace(
        piece, outputs=(*piece.outputs, *more), needs=piece.needs | (set(more) - piece.made)
    )
