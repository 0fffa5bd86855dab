"""Products of tensor parallelism as rings, wherever they stand in a traced program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from ..core.compat import eval_equation
from ..core.errors import UnsupportedError
from ..core.typing import Array, PyTree
from ..jaxpr.rewrite import Rewriting
from ..nn import Layout, manual_axes
from ..ops.ring_product import Circle, into_columns, into_rows, pieces_of

COLUMNS, ROWS = "into_columns", "into_rows"
"""The names of what a column layer and a row layer multiply by their kernels."""

SAME = ("sharding_constraint", "convert_element_type")
"""The primitives after which a value is still what it was, but for its layout and dtype."""


def into(kind: str, x: Array) -> Array:
    """Marks the input of a layer, whose product with the kernel may be a ring."""
    return checkpoint_name(x, kind)


@dataclasses.dataclass(frozen=True)
class RingProducts:
    """Computes the products of marked values as rings.

    Args:
        layout: where activations lie.
        axis: the mesh axis that splits positions between layers and features within.
    """

    layout: Layout
    axis: str

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function whose program is rewritten; traced once more here.

        Raises:
            UnsupportedError: when it is traced, and a marked value is multiplied by no matrix.
        """
        if self.layout.mesh.shape[self.axis] == 1:
            return function

        def rewritten(*args: object) -> PyTree:
            # What is marked belongs to one trace.
            marked = _Marked(self.layout, self.axis, {}, {}, set())
            replace = {"name": marked.name, "dot_general": marked.product}
            replace |= dict.fromkeys(SAME, marked.same)
            results = Rewriting(replace, lambda equation: None).of(function)(*args)
            marked.check()
            return results

        return rewritten


@dataclasses.dataclass(frozen=True)
class Mark:
    """What is known of a value: what a layer was given, before it was made whole.

    Args:
        kind: `COLUMNS` or `ROWS`.
        source: the layer's input, in the dtype of the value.
        layer: a number, of which each layer has its own.
    """

    kind: str
    source: Array
    layer: int


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A product with the settings of an equation; compares by value."""

    settings: tuple[tuple[str, Any], ...]

    def __call__(self, left: Array, right: Array) -> Array:
        """Multiplies."""
        return jax.lax.dot_general_p.bind(left, right, **dict(self.settings))


@dataclasses.dataclass(frozen=True, eq=False)
class _Marked:
    """What is marked in one trace, and what of it has been sent already.

    Args:
        layout: see `RingProducts`.
        axis: likewise.
        marks: by the identity of a value, which is held so that it stays the only one.
        sent: the pieces of a source, by its identity and dtype: layers with one input share them.
        used: the layers that have multiplied what they got.
    """

    layout: Layout
    axis: str
    marks: dict[int, tuple[Any, Mark]]
    sent: dict[Any, tuple[Any, Any]]
    used: set[int]

    def check(self) -> None:
        """Raises unless every layer that was marked has multiplied what it was given."""
        left = (mark for _, mark in self.marks.values() if mark.layer not in self.used)
        if (mark := next(left, None)) is not None:
            raise UnsupportedError(
                f"tensor_parallel has positions go round the ranks of {self.axis!r}, and a layer "
                f"of the plan that got {jax.typeof(mark.source).str_short()} multiplies no "
                f"[B, T, K] by a matrix [K, N], T a multiple of "
                f"{self.layout.mesh.shape[self.axis]}; leave rings out of tensor_parallel, or the "
                "layer out of the plan"
            )

    def name(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Marks what is named."""
        if (kind := equation.params["name"]) not in (COLUMNS, ROWS):
            return None
        mark = Mark(kind, operands[0], len(self.marks))
        return self._note(eval_equation(equation, operands), mark)

    def same(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Marks what is made of a marked value."""
        if (mark := self._mark(operands[0])) is None:
            return None
        results = eval_equation(equation, operands)
        if results[0].dtype != mark.source.dtype:
            cast = self._once(mark.source, results[0].dtype, lambda x: x.astype(results[0].dtype))
            mark = dataclasses.replace(mark, source=cast)
        return self._note(results, mark)

    def product(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes a product of a marked value with a kernel; None for any other."""
        mark = self._mark(operands[0])
        if mark is None or not self._fits(equation, mark, operands[1]):
            return None
        self.used.add(mark.layer)
        circle = Circle(self.axis, self.layout.mesh.shape[self.axis])
        how = DotGeneral(tuple(sorted(equation.params.items())))
        positions, features = PartitionSpec(None, self.axis), PartitionSpec(None, None, self.axis)
        if mark.kind == ROWS:
            specs = features, PartitionSpec(self.axis)
            run = self._mapped(lambda x, w: into_rows(circle, how, x, w), specs, positions)
            return [run(mark.source, operands[1])]
        each = (positions,) * circle.size
        send = self._mapped(functools.partial(pieces_of, circle), (positions,), each)
        pieces = self._once(mark.source, "pieces", send)
        specs = each, PartitionSpec(None, self.axis)
        run = self._mapped(lambda x, w: into_columns(circle, how, x, w), specs, features)
        return [run(pieces, operands[1])]

    def _mapped(self, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
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
        """Whether it is the product of the features of positions with a matrix that divides."""
        size, source = self.layout.mesh.shape[self.axis], mark.source
        dims = (((source.ndim - 1,), (0,)), ((), ()))
        is_matrix = kernel.ndim == 2 and equation.params["dimension_numbers"] == dims
        split = kernel.shape[1 if mark.kind == COLUMNS else 0] if is_matrix else 1
        divides = source.ndim == 3 and source.shape[1] % size == 0 and split % size == 0
        return divides and self.axis not in manual_axes()

    def _mark(self, value: object) -> Mark | None:
        found = self.marks.get(id(value))
        return None if found is None else found[1]

    def _note(self, results: list[Any], mark: Mark) -> list[Array]:
        self.marks[id(results[0])] = results[0], mark
        return results

    def _once(self, source: Any, what: object, make: Callable[[Any], Any]) -> Any:
        key = id(source), what
        if key not in self.sent:
            self.sent[key] = source, make(source)
        return self.sent[key][1]
