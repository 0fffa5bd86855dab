"""Operations that this library partitions itself: opaque kernels, linear-head losses, and rings.

The compiler partitions all others. Kernels run on each rank's samples and heads. Products of tensor
parallelism may be computed as rings, wherever they occur in a traced program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, PartitionSpec

from ..core.compat import eval_equation
from ..core.cudnn import MOST_BEFORE_HOPPER
from ..core.errors import UnsupportedError
from ..core.modules import wrap_calls
from ..core.reduction import all_sum
from ..core.same_function import Comparison, compare, is_from
from ..core.typing import Array, Function, PyTree
from ..ir.rewrite import Rewriting
from ..nn.attention import attended, call_attend
from ..nn.attention_kind import differs_by_heads
from ..nn.layout import Axes, Layout, manual_axes
from ..ops.linear_loss import (
    LINEAR_CROSS_ENTROPY,
    HeadLoss,
    LossParts,
    Operands,
    Wants,
    differentiable,
    evaluate,
)
from ..ops.ring_product import MatmulRing, into_columns, into_rows, pieces_of

OPAQUE = ("flash",)
"""The forms of attention that are one opaque kernel; XLA partitions the other forms itself."""

FUSED = ("auto", "cudnn")
"""The forms whose kernel has its own partitioning rule, which fails where other axes are manual."""


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """Runs attention in `shard_map` over samples and heads, which attention never mixes.

    Args:
        mesh: the mesh over all devices.
        batch: the axes that split the samples.
        heads: the axes that split the heads.
        is_opaque: whether the compiler cannot partition the kernel at all, so that every axis must
            be manual: a form of `OPAQUE`, or `auto` on TPUs. The other kernels, of `FUSED`, are
            left to the compiler where no axis is manual.
        most_features: the largest head that cuDNN supports on these devices; None for any.
    """

    mesh: Mesh
    batch: Axes
    heads: Axes
    is_opaque: bool = True
    most_features: int | None = None

    def __call__(
        self, attend: Callable[..., Array], module: Any, *args: object, **kwargs: object
    ) -> Array:
        """Computes `attend(module, query, key, value)` of arrays `[B, T, H, K]`.

        A user's own method whose result for a sample and a head depends on the others is left to
        the compiler, unless it is an opaque kernel.

        Raises:
            UnsupportedError: when the call has other arguments, heads are too large for the chip's
                kernel, or an opaque kernel mixes samples or heads.
        """
        query, key, value, segments = attended(attend, module, args, kwargs)
        if self.most_features is not None and query.shape[-1] > self.most_features:
            if module.form != "auto":
                raise UnsupportedError(
                    f"attention='cudnn': got heads of {query.shape[-1]} features; on GPUs before "
                    f"Hopper they may have at most {self.most_features}; use attention='auto' or "
                    "'einsum'"
                )
            module = nnx.clone(module)
            module.form = "einsum"
        more = () if segments is None else (segments,)

        def call(q, k, v, *s):
            return call_attend(attend, module, q, k, v, *s)

        manual = manual_axes()
        batch = tuple(axis for axis in self.batch if axis not in manual)
        heads = tuple(axis for axis in self.heads if axis not in manual)

        def ways(axes):
            return math.prod(self.mesh.shape[axis] for axis in axes)

        if key.shape[2] % ways(heads):
            heads = ()
        if self.is_opaque and query.shape[0] % ways(batch):
            batch = ()
        not_manual = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        is_partitioned = not self.is_opaque and not manual
        if is_partitioned or not (not_manual if self.is_opaque else batch or heads):
            return call(query, key, value, *more)
        if not is_from(attend, "axon_dist.models.", "axon_dist.nn."):
            comparison = _compare_parts(call, (query, key, value, *more), bool(batch), ways(heads))
            name = f"{type(module).__name__}.attend"
            if self.is_opaque and not comparison.is_equal:
                raise UnsupportedError(
                    f"{name} {comparison.why}, but attention={module.form!r} "
                    "runs it as one kernel on the samples and heads of each rank. Make its result "
                    "for a sample and a head independent of the others, or set form='einsum', "
                    "which the compiler partitions",
                    code="kernel-mixes-samples-or-heads",
                )
            if not comparison.equal_or_warn(name, "is left to the compiler"):
                return call(query, key, value, *more)
        spec = PartitionSpec(batch or None, None, heads or None, None)
        run = jax.shard_map(
            call,
            mesh=None if manual else self.mesh,
            axis_names=frozenset(not_manual if self.is_opaque else (*batch, *heads)),
            in_specs=(spec,) * 3 + (PartitionSpec(batch or None),) * len(more),
            out_specs=spec,
            check_vma=False,
        )
        return run(query, key, value, *more)


def _compare_parts(
    call: Function, arrays: Sequence[Array], divides_samples: bool, num_groups: int
) -> Comparison:
    """Compares attention of parts of the samples and heads with attention of all of them.

    Args:
        call: `(query, key, value[, segments])` -> results.
        arrays: the arguments of a call.
        divides_samples: whether the samples are divided.
        num_groups: into how many groups the heads are divided.
    """
    query, key, value, *segments = arrays
    if num_groups > 1 and (
        why := differs_by_heads(call, (query, key, value), num_groups, bool(segments))
    ):
        return Comparison(False, why)
    if not divides_samples:
        return Comparison(True)
    length = min(query.shape[1], 64)
    few = [jax.ShapeDtypeStruct((2, length, *x.shape[2:]), x.dtype) for x in arrays]

    def one_by_one(*arrays: Array) -> Array:
        results = [call(*(x[i : i + 1] for x in arrays)) for i in range(2)]
        return jnp.concatenate(results)

    compared = compare(call, one_by_one, few)
    if compared.is_equal or not compared.was_run:
        return compared
    return Comparison(False, "gives a sample a result that depends on the other samples")


def map_kernels(model: nnx.Module, layout: Layout) -> None:
    """Wraps attention that is one kernel, in place, in a merged model.

    Args:
        model: its modules with a `form` in `OPAQUE` or `FUSED` and a method `attend` are changed.
        layout: which axes split samples and heads.

    Raises:
        UnsupportedError: for cuDNN's attention on devices that are not GPUs.
    """
    # Read from the mesh, whose devices need not be those of this process.
    device = layout.mesh.devices.flat[0]
    on_tpu = device.platform == "tpu"
    on_gpu = device.platform in ("gpu", "cuda")
    for _, module in nnx.iter_modules(model):
        form = getattr(module, "form", None)
        if form in (*OPAQUE, *FUSED) and hasattr(module, "attend"):
            if form == "cudnn" and not on_gpu:
                raise UnsupportedError(
                    f"attention='cudnn' on devices of platform {device.platform!r}: cuDNN runs on "
                    "NVIDIA GPUs alone; use attention='auto' or 'einsum'"
                )
            is_opaque = form in OPAQUE or (on_tpu and form == "auto")
            capability = str(getattr(device, "compute_capability", "")) if on_gpu else ""
            # NVIDIA's are like `8.6`; AMD's, such as `gfx942`, are not numbers.
            is_old = form in FUSED and capability[1:2] == "." and capability < "9"
            most = MOST_BEFORE_HOPPER if is_old else None
            over = OverMesh(layout.mesh, layout.batch, layout.heads, is_opaque, most)
            wrap_calls(module, {"attend": over})


@dataclasses.dataclass(frozen=True)
class LossOverMesh:
    """Computes the cross-entropies of linear heads in a traced program on each rank's positions.

    Left to itself the compiler would gather the head, and reduce its gradient, once per chunk of
    positions. Here the head is gathered before the chunks, and its gradient is summed after them.

    Args:
        layout: the layout of the activations; its `vocabulary` axes split the classes where they
            divide.
        memory_bytes: the memory of a device; None if the chip is unknown.

    Attributes:
        replaces: the name of the primitive of such losses.
    """

    replaces: ClassVar[str] = LINEAR_CROSS_ENTROPY
    layout: Layout
    memory_bytes: int | None = None

    def __call__(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes one loss; returns None where no axis is left to split it over."""
        manual = manual_axes()
        mesh = self.layout.mesh
        if all(mesh.shape[axis] == 1 for axis in mesh.axis_names if axis not in manual):
            return None
        spread = Spread.of(self.layout, Operands(*operands), manual)
        how = equation.params["how"]

        def run(operands, wants):
            return spread.run(self.layout, self.memory_bytes, how, operands, wants)

        return list(differentiable(run)(*operands))


@dataclasses.dataclass(frozen=True)
class Spread:
    """The mesh axes that split a loss; axes that are already manual are left out.

    Args:
        samples: the axes that split dim 0 of the labels.
        sequence: the axes that split dim 1.
        vocabulary: the axes that split the columns of the kernel.
    """

    samples: Axes
    sequence: Axes
    vocabulary: Axes

    @classmethod
    def of(cls, layout: Layout, operands: Operands, manual: Axes) -> Spread:
        """Returns the axes of a layout, where they divide the sizes."""
        shape = operands.labels.shape
        classes = operands.kernel.shape[1]

        def fits(axes, size):
            if size % layout.size(axes):
                return ()
            return tuple(axis for axis in axes if axis not in manual)

        return cls(
            samples=fits(layout.batch, shape[0]) if shape else (),
            sequence=fits(layout.sequence, shape[1]) if len(shape) > 1 else (),
            vocabulary=fits(layout.vocabulary, classes),
        )

    def run(
        self,
        layout: Layout,
        memory_bytes: int | None,
        how: HeadLoss,
        operands: Operands,
        wants: Wants,
    ) -> LossParts:
        """Computes the loss and the gradients asked for."""
        ranks = (*self.samples, *self.sequence)
        columns = self.vocabulary[0] if len(self.vocabulary) == 1 else self.vocabulary or None
        positions = PartitionSpec(self.samples or None, self.sequence or None)
        positions = PartitionSpec(*positions[: operands.labels.ndim])
        full = PartitionSpec()
        kernel = PartitionSpec(None, columns)
        bias = PartitionSpec(columns)
        # Outside of manual regions the ranks' gradients are returned stacked, and the compiler sums
        # them: it can then reduce-scatter them, so that every owner gets only its shard.
        is_stacked = bool(ranks) and not manual_axes()

        def summed(grad: Array | None, operand: Array | None) -> Array | None:
            if grad is None or operand is None or not ranks:
                return grad
            # Sent in the dtype of the product, as in the plain program; float16 is the exception.
            is_float16 = operand.dtype == jnp.float16
            grad = grad if is_float16 else grad.astype(operand.dtype)
            return grad[None] if is_stacked else all_sum(grad, ranks)

        def local(*operands: Array) -> PyTree:
            result = evaluate(how, Operands(*operands), wants, columns, memory_bytes)
            total, hits = (all_sum(x, ranks) if ranks else x for x in (result.total, result.hits))
            of_hidden, *of_head = result.grads
            of_kernel, of_bias = map(summed, of_head, (operands[1], operands[4]))
            return total, hits, result.losses, (of_hidden, of_kernel, of_bias)

        lead = (ranks,) if is_stacked else ()
        of_head = PartitionSpec(*lead, None, columns), PartitionSpec(*lead, columns)
        specs = positions, kernel, positions, positions, bias
        results = (full, full, positions, (positions, *of_head))
        result = LossParts(*layout.mapped(local, specs, results, check_vma=False)(*operands))
        if not is_stacked:
            return result

        def add(x):
            return None if x is None else jax.lax.reduce_sum(x, (0,))

        of_hidden, of_kernel, of_bias = result.grads
        return result._replace(grads=(of_hidden, add(of_kernel), add(of_bias)))


COLUMNS, ROWS = "into_columns", "into_rows"
"""The names that mark the input of a column layer and of a row layer."""

SAME = ("sharding_constraint", "convert_element_type")
"""The primitives that change only the layout or dtype of a value, so that its mark is kept."""


def into(kind: str, x: Array) -> Array:
    """Marks the input of a layer whose product with the kernel may be a ring."""
    return checkpoint_name(x, kind)


@dataclasses.dataclass(frozen=True)
class RingProducts:
    """Computes the products of marked values as rings.

    Args:
        layout: the layout of the activations.
        axis: the mesh axis that splits positions between layers, and features within them.
    """

    layout: Layout
    axis: str

    def of(self, function: Function) -> Function:
        """Returns a function that traces `function` once more and runs its rewritten program.

        Raises:
            UnsupportedError: when it is traced and a marked value is not multiplied by a matrix.
        """
        if self.layout.mesh.shape[self.axis] == 1:
            return function

        def rewritten(*args: object) -> PyTree:
            # Marks are kept by the identity of traced values, so each trace needs its own.
            marked = _Marked(self.layout, self.axis, {}, {}, set())
            replace = {"name": marked.name, "dot_general": marked.product}
            replace |= dict.fromkeys(SAME, marked.same)
            results = Rewriting(replace).of(function)(*args)
            marked.check()
            return results

        return rewritten


@dataclasses.dataclass(frozen=True)
class Mark:
    """The layer input from which a value was made, before the input was gathered.

    Args:
        kind: `COLUMNS` or `ROWS`.
        source: the layer's input, in the dtype of the value.
        layer: a number that identifies the layer.
    """

    kind: str
    source: Array
    layer: int


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A `dot_general` with the parameters of an equation; compares by value."""

    settings: tuple[tuple[str, Any], ...]

    def __call__(self, left: Array, right: Array) -> Array:
        """Multiplies."""
        return jax.lax.dot_general_p.bind(left, right, **dict(self.settings))


@dataclasses.dataclass(frozen=True, eq=False)
class _Marked:
    """The marked values of one trace, and the pieces of them that were sent already.

    Args:
        layout: see `RingProducts`.
        axis: see `RingProducts`.
        marks: each mark by the id of its value, which is kept alive so that the id stays unique.
        sent: casts and sent pieces, by the id of their source: layers with one input share them.
        used: the layers that have multiplied their input.
    """

    layout: Layout
    axis: str
    marks: dict[int, tuple[Any, Mark]]
    sent: dict[Any, tuple[Any, Any]]
    used: set[int]

    def check(self) -> None:
        """Raises unless every marked layer has multiplied its input."""
        unused = (mark for _, mark in self.marks.values() if mark.layer not in self.used)
        if (mark := next(unused, None)) is not None:
            raise UnsupportedError(
                f"tensor_parallel over {self.axis!r} with rings=True needs layers that multiply "
                "[B, T, K] by a [K, N] matrix, with T a multiple of "
                f"{self.layout.mesh.shape[self.axis]}; a layer of the plan got "
                f"{jax.typeof(mark.source).str_short()}. Set rings=False, or remove the layer from "
                "the plan",
                code="rings-layer",
            )

    def name(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Marks the result of a `name` equation."""
        if (kind := equation.params["name"]) not in (COLUMNS, ROWS):
            return None
        mark = Mark(kind, operands[0], len(self.marks))
        return self._note(eval_equation(equation, operands), mark)

    def same(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Marks the result of a cast or constraint of a marked value."""
        if (mark := self._mark(operands[0])) is None:
            return None
        results = eval_equation(equation, operands)
        if results[0].dtype != mark.source.dtype:
            cast = self._once(mark.source, results[0].dtype, lambda x: x.astype(results[0].dtype))
            mark = dataclasses.replace(mark, source=cast)
        return self._note(results, mark)

    def product(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes the product of a marked value with a kernel; returns None for other products."""
        mark = self._mark(operands[0])
        if mark is None or not self._fits(equation, mark, operands[1]):
            return None
        self.used.add(mark.layer)
        ring = MatmulRing(self.axis, self.layout.mesh.shape[self.axis])
        how = DotGeneral(tuple(sorted(equation.params.items())))
        positions = PartitionSpec(None, self.axis)
        features = PartitionSpec(None, None, self.axis)
        if mark.kind == ROWS:
            specs = features, PartitionSpec(self.axis)
            run = self._mapped(lambda x, w: into_rows(ring, how, x, w), specs, positions)
            return [run(mark.source, operands[1])]
        each = (positions,) * ring.size
        send = self._mapped(functools.partial(pieces_of, ring), (positions,), each)
        pieces = self._once(mark.source, "pieces", send)
        specs = each, PartitionSpec(None, self.axis)
        run = self._mapped(lambda x, w: into_columns(ring, how, x, w), specs, features)
        return [run(pieces, operands[1])]

    def _mapped(self, function: Function, ins: Any, outs: Any) -> Function:
        # The other axes stay with the compiler, which reduces the gradients of kernels over them.
        mesh: Any = jax.sharding.get_abstract_mesh() if manual_axes() else self.layout.mesh
        return jax.shard_map(
            function,
            mesh=mesh,
            axis_names={self.axis},
            in_specs=ins,
            out_specs=outs,
            check_vma=False,
        )

    def _fits(self, equation: JaxprEqn, mark: Mark, kernel: Array) -> bool:
        """Whether it is a product of features with a matrix, of sizes that divide."""
        size = self.layout.mesh.shape[self.axis]
        source = mark.source
        dims = (((source.ndim - 1,), (0,)), ((), ()))
        is_matrix = kernel.ndim == 2 and equation.params["dimension_numbers"] == dims
        split = kernel.shape[1 if mark.kind == COLUMNS else 0] if is_matrix else 1
        divides = source.ndim == 3 and source.shape[1] % size == 0 and split % size == 0
        return divides and self.axis not in manual_axes()

    def _mark(self, value: object) -> Mark | None:
        entry = self.marks.get(id(value))
        return None if entry is None else entry[1]

    def _note(self, results: list[Any], mark: Mark) -> list[Array]:
        self.marks[id(results[0])] = results[0], mark
        return results

    def _once(self, source: Any, what: object, make: Callable[[Any], Any]) -> Any:
        """Returns `make(source)`, computed once per source and kind of result."""
        key = id(source), what
        if key not in self.sent:
            self.sent[key] = source, make(source)
        return self.sent[key][1]
