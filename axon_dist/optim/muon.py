"""Muon: orthogonalised momentum for matrices, AdamW for all other parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, MuonState

from ..core.checks import MODEL, SIZE, ArgumentKind, checked, made_by
from ..core.errors import ConfigError, did_you_mean
from ..core.modules import stacks_of
from ..core.own_context import in_own_context
from ..core.tree import map_with_path
from ..core.typing import Array, Leaf, Path, PyTree
from ..ir.rows import matrixwise

Coefficients: TypeAlias = Sequence[float] | Sequence[Sequence[float]]
"""The coefficients of one quintic for all iterations, or of one per iteration."""

JORDAN: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
"""Coefficients chosen for a steep slope at zero (Jordan et al., github.com/KellerJordan/Muon)."""

PRESETS: MappingProxyType[str, Coefficients] = MappingProxyType(
    {
        "standard": JORDAN,
        "dion": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)

PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")

Dims: TypeAlias = MuonDimensionNumbers
DimsOf: TypeAlias = "PyTree | Callable[[PyTree], PyTree] | None"
"""Which leaves are matrices, and which dims of them are rows and columns."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """Newton–Schulz iteration: brings all singular values of a matrix close to 1.

        A = X X^T,   X <- a X + (b A + c A A) X,   repeated

    Args:
        steps: the number of iterations of one quintic; with several quintics, one iteration each.
        preconditioning: how singular values are first brought below 1: by the Frobenius or the
            spectral norm, or by scales in the first iteration (AOL, Schatten-4).
        eps: added to the norm.
        rows: the input dims of the matrix, `reduction_axis` in optax.
        columns: its output dims, `output_axis` in optax; all other dims are batch dims.

    Example:
        >>> x = jnp.diag(jnp.array([4.0, 1.0]))
        >>> jax.jit(NewtonSchulz())(x, jnp.asarray(JORDAN)).round(1).tolist()
        [[0.699999988079071, 0.0], [0.0, 0.699999988079071]]
    """

    steps: int = 5
    preconditioning: str = "frobenius"
    eps: float = 1e-8
    rows: tuple[int, ...] = (0,)
    columns: tuple[int, ...] = (1,)

    def __call__(self, x: Array, coefficients: Array) -> Array:
        """Orthogonalises an array.

        Args:
            x: `[m, n]`, or an array of more dims, as `rows` and `columns` say.
            coefficients: (a, b, c), or one row of them per iteration.

        Returns:
            The result, like `x`.
        """
        batch = tuple(d for d in range(x.ndim) if d not in (*self.rows, *self.columns))
        order = (*batch, *self.rows, *self.columns)

        def size(dims):
            return math.prod(x.shape[d] for d in dims)

        matrices = x.transpose(order).reshape(-1, size(self.rows), size(self.columns))
        results = jax.vmap(lambda matrix: self._of_matrix(matrix, coefficients))(matrices)
        inverse = sorted(range(x.ndim), key=order.__getitem__)
        return results.reshape([x.shape[d] for d in order]).transpose(inverse)

    def _of_matrix(self, x: Array, coefficients: Array) -> Array:
        if x.shape[0] > x.shape[1]:
            return self._of_matrix(x.T, coefficients).T
        by_step = coefficients.astype(x.dtype)
        by_step = jnp.broadcast_to(by_step, (self.steps, 3)) if by_step.ndim == 1 else by_step
        if self.preconditioning == "frobenius":
            x = x / (jnp.linalg.norm(x) + self.eps)
        if self.preconditioning == "spectral":
            x = x / (jnp.linalg.norm(x, ord=2) + self.eps)
        for number in range(by_step.shape[0]):
            gram = x @ x.T.conj()
            if number == 0 and self.preconditioning in ("aol", "schatten"):
                x, gram = self._scaled(x, gram)
            a, b, c = by_step[number]
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def _scaled(self, x: Array, gram: Array) -> tuple[Array, Array]:
        """Scales a matrix by its Gram matrix, so that its singular values are below 1."""
        small = 1e-8
        if self.preconditioning == "aol":
            sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
            scale = jax.lax.rsqrt(jnp.maximum(sums, small))
            return x * scale, gram * scale * scale.T
        scale = jax.lax.rsqrt(jnp.maximum(jnp.linalg.norm(gram), small))
        return x * scale, gram * scale**2


_MOST_STEPS = 1000
"""The most Newton–Schulz iterations; they are unrolled in the program."""


@checked(
    ns_steps=ArgumentKind(
        f"a whole number, at least 0 and at most {_MOST_STEPS}",
        lambda x: SIZE.holds(x) and x <= _MOST_STEPS,
    )
)
def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Coefficients | str = JORDAN,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimsOf = None,
    consistent_rms: float | None = None,
    adam_weight_decay_mask: Any = None,
) -> optax.GradientTransformation:
    """Muon, equal to `optax.contrib.muon`, but distributed over the devices of a step.

        mu = beta mu + (1 - beta) g
        m = beta mu^ + (1 - beta) g^ with Nesterov momentum, else mu^
        w -= rate (scale orthogonal(m) + weight_decay w)

    Here ^ is the bias correction: a division by 1 - beta^t, with t the number of the step, or of
    the next one for mu^ with Nesterov momentum.

    The arguments, results and state are those of `optax.contrib.muon`, so either can continue from
    a state of the other. In a step, matrices of equal shape are stacked. One all-to-all gives each
    device some whole matrices to orthogonalise, and another returns them; see `DistributedUpdate`.
    In a pipeline with equal stages, each stage has its own stacks. If stages differ, every device
    of a stage orthogonalises all matrices of the stage.

    Args:
        learning_rate: the learning rate of the matrices, and of all other parameters unless
            `adam_learning_rate` is given.
        ns_coeffs: Newton–Schulz coefficients: (a, b, c), one row of them per iteration, or the name
            of a preset, `"standard"` or `"dion"`.
        ns_steps: the number of iterations, if one quintic is used for all.
        beta: decay of the momentum.
        eps: added to the norm, and in AdamW to the denominator, outside the root.
        weight_decay: the fraction of a matrix that a step at learning rate 1 removes.
        weight_decay_mask: which matrices decay: a tree of flags, or a function of the parameters.
        mu_dtype: the dtype of momenta; None for that of the parameters.
        nesterov: use Nesterov momentum.
        adaptive: multiplies each update by the inner product of the momentum and its
            orthogonalisation, the dual norm (arXiv:2409.20325).
        preconditioning: see `NewtonSchulz`.
        adam_b1: AdamW, for all other parameters: decay of the mean.
        adam_b2: AdamW: decay of the mean of squares.
        adam_eps_root: AdamW: added under the square root.
        adam_weight_decay: AdamW: the fraction that a step at learning rate 1 removes.
        adam_learning_rate: AdamW: None for that of the matrices.
        muon_weight_dimension_numbers: a tree of `optax.contrib.MuonDimensionNumbers`, with None for
            leaves that are not matrices, or a function from parameters to such a tree, such as
            `hidden_matrices`. None takes every leaf of two dims, including embeddings and heads, as
            optax does.
        consistent_rms: scales updates by `sqrt(max(m, n))` times this (arXiv:2502.16982, 0.2 there)
            instead of `sqrt(max(1, n / m))`, for m inputs and n outputs of a matrix.
        adam_weight_decay_mask: which of the other parameters decay; optax has no such argument.

    Returns:
        The optax transformation.

    Raises:
        ConfigError: for an unknown preset or preconditioning, or coefficients of another shape.

    Example:
        >>> optimizer, params = muon(0.02), {"w": jnp.eye(2), "b": jnp.zeros(2)}
        >>> updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        >>> float(abs(updates["b"]).max())
        0.0

    Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training,
    arXiv:2502.16982.
    """
    orthogonal = _Orthogonal(
        _coefficients(ns_coeffs, ns_steps),
        NewtonSchulz(ns_steps, preconditioning, eps),
        beta,
        mu_dtype,
        nesterov,
        adaptive,
        muon_weight_dimension_numbers,
    )
    shape_scale = optax.stateless(
        lambda updates, params: orthogonal.scaled(updates, consistent_rms)
    )
    return optax.partition(
        {
            "muon": optax.chain(
                optax.GradientTransformation(orthogonal.init, orthogonal.update),
                shape_scale,
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": optax.adamw(
                learning_rate if adam_learning_rate is None else adam_learning_rate,
                b1=adam_b1,
                b2=adam_b2,
                eps=eps,
                eps_root=adam_eps_root,
                weight_decay=adam_weight_decay,
                mask=adam_weight_decay_mask,
                mu_dtype=mu_dtype,
                nesterov=nesterov,
            ),
        },
        orthogonal.labels,
    )


@in_own_context
def hidden_matrices(model: nnx.Module | Callable[[], nnx.Module]) -> Callable[[PyTree], PyTree]:
    """Finds the matrices inside a model's blocks, for `muon_weight_dimension_numbers`.

    Muon is meant for these: the kernels of `nnx.Linear`, `nnx.LinearGeneral` and other layers with
    two dims, in modules that the model keeps in lists or stacks by `nnx.vmap`. Embeddings, norms,
    and heads outside of lists and stacks stay with AdamW. A head in a list, as in `nnx.Sequential`,
    counts as hidden.

    Args:
        model: the model, or a function of no arguments that makes it.

    Returns:
        A function from parameters to a tree of the same structure: `MuonDimensionNumbers` or None.

    Raises:
        ConfigError: when no block of the model has such a matrix.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> matrices = hidden_matrices(model)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        >>> matrices["layers"][0]["bias"], matrices["layers"][0]["kernel"].output_axis
        (None, (1,))
    """
    MODEL.check("hidden_matrices", "model", model)
    instance: Any = model
    if not isinstance(model, nnx.Module):
        with nnx.use_eager_sharding(False):
            instance = nnx.eval_shape(lambda: made_by(model, "hidden_matrices"))
    stacks = tuple(stacks_of(instance))
    modules = {"/".join(map(str, keys)): module for keys, module in nnx.iter_modules(instance)}

    def dims_of(path: Path, leaf: Leaf) -> Dims | None:
        stack = next((s for s in stacks if path.startswith(f"{s}/") or not s), None)
        if stack is None and not any(key.isdigit() for key in path.split("/")):
            return None
        lead = int(stack is not None)
        module = modules.get(path.rpartition("/")[0])
        if not path.endswith("kernel") or leaf.ndim - lead < 2:
            return None
        num_row_dims = 1
        if isinstance(module, nnx.LinearGeneral):
            num_row_dims = len(module.in_features)
            lead += len(module.batch_axis)
        elif leaf.ndim - lead > 2:
            return None
        dims = tuple(range(lead, leaf.ndim))
        return Dims(dims[:num_row_dims], dims[num_row_dims:])

    variables = nnx.to_pure_dict(nnx.state(instance, nnx.Param))
    matrices = map_with_path(dims_of, variables)
    if not any(isinstance(leaf, Dims) for leaf in jax.tree.leaves(matrices, is_leaf=_is_dims)):
        raise ConfigError(
            "no block of the model has a kernel of two dims for Muon: blocks are modules that the "
            "model keeps in lists or stacks by nnx.vmap. Name the matrices with "
            "muon_weight_dimension_numbers, or use another optimizer"
        )
    return lambda params: map_with_path(dims_of, params)


@dataclasses.dataclass(frozen=True, eq=False)
class _Orthogonal:
    """`optax.contrib.scale_by_muon`, with orthogonalisation as one primitive of the program."""

    coefficients: Any
    newton_schulz: NewtonSchulz
    beta: float
    mu_dtype: Any
    nesterov: bool
    adaptive: bool
    dims: DimsOf

    def __post_init__(self) -> None:
        name = self.newton_schulz.preconditioning
        if name not in PRECONDITIONINGS:
            raise ConfigError(
                f"unknown preconditioning {name!r}.{did_you_mean(name, PRECONDITIONINGS)}"
            )

    def labels(self, params: PyTree) -> PyTree:
        """Labels matrices `"muon"` and all other leaves `"adam"`."""
        labels = ["adam" if dims is None else "muon" for dims in self._dims_of(params)]
        return jax.tree.unflatten(jax.tree.structure(params), labels)

    def init(self, params: PyTree) -> MuonState:
        """Returns the initial state."""
        mu = optax.tree.zeros_like(params, dtype=self.mu_dtype)
        return MuonState(jnp.zeros([], jnp.int32), mu, jnp.asarray(self.coefficients))

    def update(self, updates: PyTree, state: PyTree, params: PyTree = None) -> PyTree:
        """Returns the orthogonalised momenta and the next state."""
        beta = self.beta
        correct = optax.tree.bias_correction
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = correct(mu, beta, optax.safe_increment(count) if self.nesterov else count)
        if self.nesterov:
            gradient = correct(updates, beta, count)
            ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, gradient)
        leaves, structure = jax.tree.flatten(ahead)
        pairs = zip(leaves, self._dims_of(ahead), strict=True)
        orthogonal = [self._orthogonalised(x, dims, state.ns_coeffs) for x, dims in pairs]
        if self.adaptive:
            duals = zip(leaves, orthogonal, strict=True)
            orthogonal = [jnp.sum(x.conj() * y) * y for x, y in duals]
        mu = optax.tree.cast(mu, self.mu_dtype)
        return structure.unflatten(orthogonal), MuonState(count, mu, state.ns_coeffs)

    def scaled(self, updates: PyTree, rms: float | None) -> PyTree:
        """Scales updates by the sizes of their matrices."""
        leaves, structure = jax.tree.flatten(updates)

        def scale(x: Any, dims: Dims | None) -> PyTree:
            rows, columns = _axes(x, dims)
            m = math.prod(x.shape[d] for d in rows)
            n = math.prod(x.shape[d] for d in columns)
            if rms is None:
                return x * jnp.sqrt(jnp.maximum(1, n / m))
            return x * (jnp.sqrt(jnp.maximum(m, n)) * rms)

        pairs = zip(leaves, self._dims_of(updates), strict=True)
        return structure.unflatten(scale(x, dims) for x, dims in pairs)

    def _orthogonalised(self, x: Array, dims: Dims | None, coefficients: Array) -> Array:
        rows, columns = _axes(x, dims)
        lead = min((*rows, *columns))
        rows = tuple(d - lead for d in rows)
        columns = tuple(d - lead for d in columns)
        is_matrix = (rows, columns) == ((0,), (1,)) and x.ndim == lead + 2
        if not is_matrix:
            ns = dataclasses.replace(self.newton_schulz, rows=rows, columns=columns)
            return matrixwise(ns, x, coefficients, lead=lead)
        # Tall matrices are transposed first, so that they share a stack with the wide ones.
        if x.shape[-2] > x.shape[-1]:
            wide = jnp.swapaxes(x, -1, -2)
            result = matrixwise(self.newton_schulz, wide, coefficients, lead=lead)
            return jnp.swapaxes(result, -1, -2)
        return matrixwise(self.newton_schulz, x, coefficients, lead=lead)

    def _dims_of(self, tree: PyTree) -> list[Dims | None]:
        """Returns the dims of every leaf of a tree like the parameters, masked or not."""
        if self.dims is None:
            return [Dims() if x.ndim == 2 else None for x in jax.tree.leaves(tree)]
        dims = self.dims(tree) if callable(self.dims) else self.dims
        by_leaf: list[Dims | None] = []

        def collect(leaf_dims, subtree):
            return by_leaf.extend(leaf_dims for _ in jax.tree.leaves(subtree))

        jax.tree.map(collect, dims, tree, is_leaf=_is_dims)
        return by_leaf


def _is_dims(x: Any) -> bool:
    return x is None or isinstance(x, (MuonDimensionNumbers, optax.MaskedNode))


def _axes(x: Any, dims: Dims | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dims of rows and of columns, as non-negative numbers."""
    if not isinstance(dims, MuonDimensionNumbers):
        raise ConfigError(
            f"muon_weight_dimension_numbers has {dims!r:.60} for an array of shape "
            f"{tuple(x.shape)}; give an optax.contrib.MuonDimensionNumbers, or None where an array "
            "is not a matrix"
        )

    def read(axes):
        return tuple(a % x.ndim for a in (axes if isinstance(axes, Iterable) else (axes,)))

    rows = read(dims.reduction_axis)
    columns = read(dims.output_axis)
    if set(rows) & set(columns) or x.ndim < 2:
        raise ConfigError(
            f"muon_weight_dimension_numbers has {dims} for an array of shape {tuple(x.shape)}; "
            "the array needs at least two dims, and no dim may be both a row and a column dim",
            code="muon-dims",
        )
    return rows, columns


def _coefficients(values: Coefficients | str, steps: int) -> Any:
    if isinstance(values, str):
        if values not in PRESETS:
            raise ConfigError(f"unknown ns_coeffs {values!r}.{did_you_mean(values, PRESETS)}")
        values = PRESETS[values]
    shape = np.shape(values)
    if len(shape) not in (1, 2) or shape[-1] != 3 or (len(shape) == 2 and shape[0] > steps):
        raise ConfigError(
            f"ns_coeffs has the shape {shape}; it must be (3,), or (n, 3) with n at most "
            f"ns_steps={steps}: the coefficients of a quintic, or of one for each iteration"
        )
    return values
