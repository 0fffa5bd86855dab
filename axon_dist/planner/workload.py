"""`Workload`: what is to be trained, read from the model and its loss."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ..core.errors import AxonDistError, ConfigError
from ..core.tree import num_params
from ..core.typing import Batch, LossFn, PyTree
from ..core.weighted import Weighted
from ..jaxpr.device import tape_of
from ..jaxpr.placement import whole
from ..nn import block_paths
from ..nn.attention import mixes
from ..ops.precision import MixedPrecision, autocast, cast_floating
from ..parallel import suggest_plan
from ..parallel.expert import EXPERTS, ByExperts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What says which arrangements of a model and its batch are worth a trace.

    Args:
        num_params: trainable scalars.
        num_layers: blocks that the model repeats; 1 where it repeats none.
        flops: of the products of a step over all devices, nothing recomputed.
        global_batch: samples of a step, over all devices and microbatches.
        has_attention: whether a module of it mixes positions by attention.
        num_experts: what the numbers of experts of its mixtures have in common; 1 without any.
        precision: a policy or a preset's name; None is float32.

    Raises:
        ConfigError: for a model without parameters, an empty batch or an unknown precision.

    Example:
        >>> sizes = {"num_params": 10, "num_layers": 4, "flops": 60.0, "has_attention": False}
        >>> work = Workload(**sizes, global_batch=8)
        >>> work.divides(1, 4, 1), work.divides(1, 8, 1), work.divides(1, 1, 2)
        (True, False, False)
    """

    num_params: int
    num_layers: int
    flops: float
    global_batch: int
    has_attention: bool = False
    num_experts: int = 1
    precision: MixedPrecision | str | bool | None = None

    def __post_init__(self) -> None:
        if self.num_params < 1:
            raise ConfigError("the model has no trainable parameters; there is nothing to plan")
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} must be at least 1 sample")
        MixedPrecision.of(self.precision)

    @property
    def policy(self) -> MixedPrecision:
        """The dtypes."""
        return MixedPrecision.of(self.precision)

    def divides(self, tp: int, pp: int, cp: int, ep: int = 1) -> bool:
        """Whether such sizes are worth a try; only the step itself knows what it can split."""
        blocks = pp == 1 or (self.num_layers > 1 and self.num_layers >= pp)
        return blocks and self.num_experts % ep == 0 and (cp == 1 or self.has_attention)


def workload_of(
    model: nnx.Module | Callable[[], nnx.Module],
    loss_fn: LossFn,
    batch: Batch,
    precision: MixedPrecision | str | bool | None = None,
    platform: str = "cuda",
) -> Workload:
    """Reads what is to be trained from the loss and its derivative, on the whole batch.

    Nothing is computed and no parameter is made.

    Args:
        model: any NNX module, or a function that makes one.
        loss_fn: `loss_fn(model, batch)`, as `build_train_step` takes it.
        batch: a global batch of shapes; leaves `[B, ...]`.
        precision: a policy or a preset's name; None is float32.
        platform: `"cpu"`, `"cuda"` or `"tpu"`, which branches are taken for.

    Returns:
        The workload.

    Raises:
        ConfigError: for a model without parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
        >>> work = workload_of(model, loss_fn, {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)})
        >>> work.num_params, work.flops  # of 8 samples: 2 x 16 forward, as many for the kernel
        (16, 512.0)
    """
    make = model if not isinstance(model, nnx.Module) else lambda: model
    abstract = nnx.eval_shape(make)
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    run = functools.partial(_loss, graphdef, loss_fn, MixedPrecision.of(precision))
    closed = jax.make_jaxpr(jax.value_and_grad(run))(params, rest, batch)
    splits = [whole(len(getattr(aval, "shape", ()))) for aval in closed.in_avals]
    return Workload(
        num_params=num_params(params),
        num_layers=max(len(block_paths(abstract)), 1),
        flops=tape_of(closed, splits, {}, platform).flops,
        global_batch=jax.tree.leaves(batch)[0].shape[0],
        has_attention=any(mixes(module) for _, module in nnx.iter_modules(abstract)),
        num_experts=_experts(make, params),
        precision=precision,
    )


def _experts(make: Callable[[], nnx.Module], params: PyTree) -> int:
    """How many experts the mixtures of a model have in common."""
    flat = {"/".join(map(str, k)): v.get_value().shape for k, v in nnx.to_flat_state(params)}
    if not any(len(shape) > 2 for shape in flat.values()):
        return 1
    try:
        patterns = suggest_plan(make).experts
    except AxonDistError:  # A model that cannot be tried without inputs.
        patterns = EXPERTS
    policy = ByExperts(tuple((p, dim) for p, dim in patterns if dim is not None), "ep")
    dims = {path: policy.dim_of(path, shape) for path, shape in flat.items()}
    return math.gcd(*(flat[path][dim] for path, dim in dims.items() if dim is not None)) or 1


def _loss(
    graphdef: nnx.GraphDef,
    loss_fn: LossFn,
    policy: MixedPrecision,
    params: PyTree,
    rest: PyTree,
    batch: Batch,
) -> Any:
    module = nnx.merge(graphdef, cast_floating(params, policy.compute), rest, copy=True)
    if policy.is_mixed:
        autocast(module, policy)
    found = loss_fn(module, batch)
    loss = found[0] if isinstance(found, tuple) else found
    return loss.mean if isinstance(loss, Weighted) else loss
