"""`Profile`: what a sample costs a model, read from the model's own program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..core.errors import AxonDistError, ConfigError
from ..core.tree import num_params
from ..core.typing import Batch, LossFn, PyTree
from ..core.weighted import Weighted
from ..nn import block_paths
from ..nn.attention import mixes
from ..ops.fp8 import fp8_reasons
from ..ops.precision import MixedPrecision, autocast, cast_floating
from ..parallel import remake_in_backward, suggest_plan
from ..parallel.expert import EXPERTS, ByExperts
from ..program import RematPolicy, handed_on, mark_units, scan_over_layers
from ..program.device import tape_of
from ..program.liveness import peak_of
from ..program.placement import whole
from .workload import Workload

ROWS = 1024
"""Samples that are traced for: so many that the peak is that of activations."""

RECOMPUTE = jax.checkpoint_policies.nothing_saveable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The sizes of any model that memory, traffic and time of a step depend on.

    Args:
        num_params: trainable scalars.
        num_layers: blocks that the model repeats; 1 where it repeats none.
        layer_params: parameters of the largest block; of the model where it repeats none.
        sample_flops: products of forward and backward pass of one sample.
        sample_bytes: what one sample keeps for the backward pass at its peak.
        remat_bytes: the same where every block is recomputed.
        remade_bytes: the same where blocks keep what they work for and make the rest again, as
            those do that free their weights.
        stream_bytes: what a block hands to the next for one sample.
        has_attention: whether a module of it mixes positions by attention.
        num_experts: what the numbers of experts of its mixtures have in common; 1 without any.
        expert_params: parameters of all experts together.
        product_params: weights of the dense layers that compute in fp8, where it is asked for.

    Raises:
        ConfigError: for a model without parameters.
    """

    num_params: int
    num_layers: int
    layer_params: int
    sample_flops: float
    sample_bytes: int
    remat_bytes: int
    remade_bytes: int
    stream_bytes: int
    has_attention: bool
    num_experts: int = 1
    expert_params: int = 0
    product_params: int = 0

    def __post_init__(self) -> None:
        if self.num_params < 1:
            raise ConfigError("the model has no trainable parameters; there is nothing to plan")

    def flops(self, samples: int, recomputed: int = 0) -> float:
        """Operations of a step: a forward pass takes a third, each recomputation one more."""
        return self.sample_flops * samples * (3 + recomputed) / 3

    def stream(self, samples: int, itemsize: int) -> int:
        """Bytes that a block hands to the next; they were read in the dtype of the compute."""
        return self.stream_bytes * samples

    def activations(
        self,
        samples: int,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        remat: bool = False,
        remade: bool = False,
        in_flight: int = 0,
        **_: Any,
    ) -> int:
        """Bytes at the peak of a step: what is kept lies split over stages and ranks."""
        kept = self.remade_bytes if remade else self.sample_bytes
        kept = self.remat_bytes if remat else kept
        return samples * (kept // (tp * pp * cp) + in_flight * self.stream_bytes // (tp * cp))

    def divides(self, tp: int, pp: int, cp: int, ep: int = 1) -> bool:
        """Whether such sizes are worth a try; only the step itself knows what it can split."""
        blocks = pp == 1 or (self.num_layers > 1 and self.num_layers >= pp)
        # What tensor and context parallelism send is counted by what blocks hand on: where that is
        # not known they would seem to cost nothing.
        known = self.stream_bytes > 0 or tp == cp == 1
        return blocks and known and self.num_experts % ep == 0 and (cp == 1 or self.has_attention)

    @property
    def words(self) -> str:
        """What divides, in words."""
        return f"{self.num_layers} blocks"


def workload_of(
    model: nnx.Module | Callable[[], nnx.Module],
    loss_fn: LossFn,
    batch: Batch,
    optimizer: str | optax.GradientTransformation = "adam",
    precision: MixedPrecision | str | bool | None = None,
    platform: str = "cuda",
) -> Workload:
    """Reads what is to be trained from the programs of its loss and their derivative.

    Nothing is computed and no parameter is made: forward and backward pass are traced for many
    and for twice as many samples, as they are, with every block recomputed, and with blocks that
    keep what those of FSDP do, and what is alive at their peak is counted.

    Args:
        model: any NNX module, or a function that makes one.
        loss_fn: `loss_fn(model, batch)`, as `build_train_step` takes it.
        batch: a global batch of shapes; leaves `[B, ...]`.
        optimizer: a name of `OPTIMIZERS`, or an optax transformation.
        precision: a policy or a preset's name; None is float32.
        platform: `"cpu"`, `"cuda"` or `"tpu"`, which branches are taken for.

    Returns:
        The workload, its `shape` a `Profile`.

    Raises:
        ConfigError: for a model without parameters.

    Example:
        >>> model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
        >>> work = workload_of(model, loss_fn, {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)})
        >>> work.shape.num_params, work.shape.sample_flops  # 2 x 16 forward, as many for the kernel
        (16, 64.0)
    """
    make = model if not isinstance(model, nnx.Module) else lambda: model
    policy = MixedPrecision.of(precision)
    abstract = nnx.eval_shape(make)
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    units = block_paths(abstract)
    run = functools.partial(_loss, graphdef, loss_fn, policy, units)
    read = lambda rows, keep=None: _read(run, params, rest, batch, rows, keep, platform)
    (flops_1, bytes_1, _), (flops_2, bytes_2, stream) = read(ROWS), read(2 * ROWS)
    grows = lambda few, many: max(0, many - few) // ROWS
    again = lambda keep: grows(*(read(rows, keep)[1] for rows in (ROWS, 2 * ROWS)))
    plain = grows(bytes_1, bytes_2)
    blocks = [num_params(_within(params, path)) for path in units]
    total = num_params(params)
    shape = Profile(
        num_params=total,
        num_layers=max(len(units), 1),
        layer_params=max(blocks, default=total),
        sample_flops=(flops_2 - flops_1) / ROWS,
        sample_bytes=plain,
        remat_bytes=again(RECOMPUTE) if units else plain,
        remade_bytes=again(remake_in_backward) if units else plain,
        stream_bytes=stream // (2 * ROWS),
        has_attention=any(mixes(module) for _, module in nnx.iter_modules(abstract)),
        product_params=_in_fp8(abstract, policy, params),
        **_experts(make, params),
    )
    rows = jax.tree.leaves(batch)[0].shape[0]
    return Workload(shape=shape, global_batch=rows, optimizer=optimizer, precision=precision)


def _in_fp8(model: nnx.Module, policy: MixedPrecision, params: Any) -> int:
    """The weights of the layers that compute in fp8 under a policy."""
    if policy.products is None:
        return 0
    layers = [path for path, why in fp8_reasons(model, policy.skip).items() if not why]
    sizes = {"/".join(map(str, k)): v.get_value().size for k, v in nnx.to_flat_state(params)}
    return sum(sizes.get(f"{layer}/kernel", 0) for layer in layers)


def _experts(make: Callable[[], nnx.Module], params: Any) -> dict[str, int]:
    """How many experts the mixtures of a model have in common, and their parameters."""
    flat = {"/".join(map(str, k)): v.get_value().shape for k, v in nnx.to_flat_state(params)}
    if not any(len(shape) > 2 for shape in flat.values()):
        return {}
    try:
        patterns = suggest_plan(make).experts
    except AxonDistError:  # A model that cannot be tried without inputs.
        patterns = EXPERTS
    policy = ByExperts(tuple((p, dim) for p, dim in patterns if dim is not None), "ep")
    dims = {path: policy.dim_of(path, shape) for path, shape in flat.items()}
    counts = [flat[path][dim] for path, dim in dims.items() if dim is not None]
    stacked = sum(math.prod(flat[path]) for path, dim in dims.items() if dim is not None)
    return {"num_experts": math.gcd(*counts) or 1, "expert_params": stacked}


def _within(params: Any, path: str) -> PyTree:
    flat = nnx.to_flat_state(params)
    prefix = path + "/"
    return [v.get_value() for keys, v in flat if "/".join(map(str, keys)).startswith(prefix)]


def _loss(
    graphdef: Any,
    loss_fn: LossFn,
    policy: MixedPrecision,
    units: frozenset[str],
    marked: bool,
    params: Any,
    rest: Any,
    batch: Batch,
) -> Any:
    module = nnx.merge(graphdef, cast_floating(params, policy.compute), rest, copy=True)
    if marked:
        mark_units(module, lambda path, _: path in units)
    if policy.is_mixed:
        autocast(module, policy)
    found = loss_fn(module, batch)
    loss = found[0] if isinstance(found, tuple) else found
    return loss.mean if isinstance(loss, Weighted) else loss


def _read(
    run: Callable[..., Any],
    params: Any,
    rest: Any,
    batch: Batch,
    rows: int,
    keep: RematPolicy | None,
    platform: str,
) -> tuple[float, int, int]:
    """Operations, bytes at the peak, and bytes of the largest thing that blocks hand on."""
    few = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    forward = functools.partial(run, keep is not None)
    if keep is not None:
        forward = scan_over_layers(forward, 1, keep)
    closed = jax.make_jaxpr(jax.value_and_grad(forward))(params, rest, few)
    splits = [whole(len(getattr(aval, "shape", ()))) for aval in closed.in_avals]
    tape = tape_of(closed, splits, {}, platform)
    return tape.flops, peak_of(tape).num_bytes, _stream(run, params, rest, few)


def _stream(run: Callable[..., Any], params: Any, rest: Any, batch: Batch) -> int:
    jaxpr = jax.make_jaxpr(functools.partial(run, True))(params, rest, batch).jaxpr
    return max(
        (math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in handed_on(jaxpr)), default=0
    )
