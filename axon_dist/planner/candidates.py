"""`Candidate`: a mesh with strategies; `candidates` yields those that are worth comparing.

`Workload` describes the training to plan, read from the model and its loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..core.checks import COUNT, NUMBER, TEXT, ArgumentKind, checked, made_by
from ..core.errors import AxonDistError, ConfigError, ScheduleError, did_you_mean
from ..core.own_context import in_own_context
from ..core.renamed import renamed_attribute
from ..core.tree import num_params
from ..core.typing import Batch, JsonDict, LossFn, PyTree
from ..core.weighted import Shared, Weighted
from ..mesh import SLOW_AXES, MeshSpec
from ..mesh.chips import Hardware
from ..nn import block_paths, mixes
from ..ops.precision import MixedPrecision, autocast, cast_floating
from ..parallel import (
    DEFAULT_SYNC_EVERY,
    EXPERTS,
    STRATEGIES,
    ZERO,
    ByExperts,
    resolve_name,
    suggest_plan,
)
from ..schedule import PipelineSchedule, build_schedule
from .device import liveness_program
from .kernel_work import useful_flops
from .liveness import peak_of
from .placement import unsplit
from .reading import idle_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a model and its batch that decide which candidates are worth a trace.

    Args:
        num_params: trainable scalars.
        num_layers: blocks that the model repeats; 1 where it repeats none.
        flops: FLOPs of a step's products over all devices. No block is recomputed, but the backward
            pass of fused attention recomputes its scores.
        global_batch: samples per step, over all devices and microbatches.
        has_attention: whether one of its modules mixes positions by attention.
        num_experts: the greatest common divisor of the expert counts of its mixtures; 1 without
            any.
        precision: a policy or a preset's name; None is float32.
        useful_flops: the part of `flops` that MFU counts, without recomputation; 0 if the program
            does not tell: where positions are masked, and in mixtures of experts. `plan_config`
            counts the FLOPs of models of tokens as their runs do.
        activations: bytes that the forward pass of the whole batch keeps for the backward pass, if
            nothing is recomputed; 0 where they were not counted.

    Raises:
        ConfigError: for a model without parameters, an empty batch or an unknown precision.

    Example:
        >>> sizes = {"num_params": 10, "num_layers": 4, "flops": 60.0, "has_attention": False}
        >>> work = Workload(**sizes, global_batch=8)
        >>> [work.is_worth_trying(1, pp, cp) for pp, cp in ((4, 1), (8, 1), (1, 2))]
        [True, False, False]
    """

    num_params: int
    num_layers: int
    flops: float
    global_batch: int
    has_attention: bool = False
    num_experts: int = 1
    precision: MixedPrecision | str | bool | None = None
    useful_flops: float = 0.0
    activations: int = 0

    def __post_init__(self) -> None:
        NUMBER.check("Workload", "num_params", self.num_params)
        if self.num_params < 1:
            raise ConfigError("the model has no trainable parameters; there is nothing to plan")
        COUNT.check("Workload", "global_batch", self.global_batch)
        MixedPrecision.of(self.precision)

    @property
    def policy(self) -> MixedPrecision:
        """The dtypes."""
        return MixedPrecision.of(self.precision)

    def is_worth_trying(self, tp: int, pp: int, cp: int, ep: int = 1) -> bool:
        """Whether to try these sizes of axes; only building the step shows what can be split."""
        blocks = pp == 1 or (self.num_layers > 1 and self.num_layers >= pp)
        return blocks and self.num_experts % ep == 0 and (cp == 1 or self.has_attention)

    divides = renamed_attribute("divides", "is_worth_trying")


@in_own_context
def workload_of(
    model: nnx.Module | Callable[[], nnx.Module],
    loss_fn: LossFn,
    batch: Batch,
    precision: MixedPrecision | str | bool | None = None,
    platform: str = "cuda",
) -> Workload:
    """Reads the workload from the traced loss and its derivative, on the whole batch.

    Nothing is computed and no parameter is made.

    Args:
        model: any NNX module, or a function that makes one.
        loss_fn: `loss_fn(model, batch)`, as for `build_train_step`.
        batch: a global batch of shapes; leaves `[B, ...]`, or `Shared`.
        precision: a policy or a preset's name; None is float32.
        platform: `"cpu"`, `"gpu"` (or `"cuda"`) or `"tpu"`; its platform-dependent branches are
            read.

    Returns:
        The workload.

    Raises:
        ConfigError: for a model without parameters, and for a batch without samples.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
        >>> work = workload_of(model, loss_fn, {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)})
        >>> work.num_params, work.flops  # of 8 samples: 2 x 16 forward, as many for the kernel
        (16, 512.0)
    """
    # With eager sharding, models with sharding annotations would need a mesh in context.
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: made_by(model, "workload_of"))
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    policy = MixedPrecision.of(precision)

    def mean_loss(params: PyTree, rest: PyTree, batch: Batch) -> Any:
        module = nnx.merge(graphdef, cast_floating(params, policy.compute), rest, copy=True)
        if policy.is_mixed:
            autocast(module, policy)
        output = loss_fn(module, batch)
        loss = output[0] if isinstance(output, tuple) else output
        return loss.mean if isinstance(loss, Weighted) else loss

    global_batch = _num_samples(batch)
    plain = jax.tree.map(lambda x: x.value if isinstance(x, Shared) else x, batch)
    closed = jax.make_jaxpr(jax.value_and_grad(mean_loss))(params, rest, plain)
    splits = [unsplit(len(getattr(aval, "shape", ()))) for aval in closed.in_avals]
    program = liveness_program(closed, splits, {}, platform)
    grads = sum(program.sizes[buffer] for buffer in program.outputs)
    mixers = [module for _, module in nnx.iter_modules(abstract) if mixes(module)]
    # Only some kernels skip masked pairs, and a program does not show which pairs are masked.
    is_masked = any(getattr(module, "causal", True) for module in mixers)
    return Workload(
        num_params=num_params(params),
        num_layers=max(len(block_paths(abstract)), 1),
        flops=program.flops,
        useful_flops=0.0 if is_masked else useful_flops(program),
        activations=max(0, peak_of(program) - grads),
        global_batch=global_batch,
        has_attention=bool(mixers),
        num_experts=_experts(model, params),
        precision=precision,
    )


def _num_samples(batch: Batch) -> int:
    """Returns the number of samples of a batch; its `Shared` leaves have none."""
    rows = [np.shape(x)[:1] for x in jax.tree.leaves(batch) if not isinstance(x, Shared)]
    if not rows or not rows[0]:
        raise ConfigError(
            f"workload_of got a batch with {len(rows)} leaves besides Shared ones, and no samples "
            "in the first; give leaves of shape [B, ...]"
        )
    return rows[0][0]


def _experts(model: nnx.Module | Callable[[], nnx.Module], params: PyTree) -> int:
    """Returns the greatest common divisor of the expert counts of a model's mixtures."""
    flat = {"/".join(map(str, k)): v.get_value().shape for k, v in nnx.to_flat_state(params)}
    if not any(len(shape) > 2 for shape in flat.values()):
        return 1
    try:
        patterns = suggest_plan(model).experts
    except AxonDistError:  # The model cannot be traced with guessed inputs.
        patterns = EXPERTS
    policy = ByExperts(tuple((p, dim) for p, dim in patterns if dim is not None), "ep")
    dims = {path: policy.dim_of(path, shape) for path, shape in flat.items()}
    return math.gcd(*(flat[path][dim] for path, dim in dims.items() if dim is not None)) or 1


AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""The axes within a replica, outer to inner."""

_MODEL_AXES = ("cp", "ep", "tp", "pp")
"""The axes that split the model or its positions, in the order in which configs name strategies."""


@dataclasses.dataclass(frozen=True)
class SlowReplicas:
    """How replicas over slow links train between outer steps; results differ from one device.

    Args:
        strategy: `"diloco"` or `"local_sgd"`.
        every: the steps between two outer steps.
        axis: the mesh axis over the slow links.

    Raises:
        ConfigError: for another strategy or axis, or a number of steps below 1.
    """

    strategy: str = "diloco"
    every: int = DEFAULT_SYNC_EVERY
    axis: str = "nodes"

    def __post_init__(self) -> None:
        known = STRATEGIES.over(*SLOW_AXES)
        if self.strategy not in known:
            raise ConfigError(
                f"unknown strategy {self.strategy!r} over slow links."
                f"{did_you_mean(self.strategy, known)}"
            )
        if self.axis not in SLOW_AXES or self.every < 1:
            raise ConfigError(
                f"{self.strategy} got axis={self.axis!r} and every={self.every}; the axis must be "
                f"{' or '.join(SLOW_AXES)}, and every at least 1 step"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh with strategies, to be ranked by its step time.

    Args:
        strategy: the data-parallel strategy over `dp` and `fsdp`, by one of its names;
            `hybrid` splits over `fsdp` and replicates over `dp`.
        pp: ranks of the pipeline.
        dp: ranks that split the batch.
        fsdp: ranks that split the batch and, usually, the parameters.
        cp: ranks of context parallelism, which split the positions of a sample.
        ep: ranks that split the experts and also the batch.
        tp: ranks of tensor parallelism.
        replicas: how many copies of all these there are, over slow links.
        slow_replicas: how the replicas train between outer steps; None if there is only one.
        num_microbatches: microbatches per step on a rank.
        remat: whether the blocks are recomputed in the backward pass.
        sequence: whether tensor parallelism splits positions between its products.
        schedule: the pipeline's schedule. A step is one scan whose ticks last as long as their
            slowest rank, and eager 1F1B fills more of each tick than 1F1B does.

    Raises:
        ConfigError: for an unknown strategy or schedule, a size below 1, or `hybrid` without two
            axes.

    Example:
        >>> candidate = Candidate(strategy="fsdp", pp=8, fsdp=16, tp=8)
        >>> candidate.name, str(candidate.mesh)
        ('pp + tp + fsdp', 'pp=8,fsdp=16,tp=8')
    """

    strategy: str = "ddp"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1
    slow_replicas: SlowReplicas | None = None
    num_microbatches: int = 1
    remat: bool = False
    sequence: bool = False
    schedule: str = PipelineSchedule.EAGER_1F1B

    def __post_init__(self) -> None:
        TEXT.check("Candidate", "strategy", self.strategy)
        object.__setattr__(self, "strategy", resolve_name(self.strategy)[0])
        object.__setattr__(self, "schedule", PipelineSchedule(self.schedule))
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless names are known and sizes positive."""
        known = STRATEGIES.of_data()
        if self.strategy not in known:
            raise ConfigError(
                f"unknown strategy {self.strategy!r:.80}.{did_you_mean(self.strategy, known)}"
            )
        for field in (*AXES, "replicas", "num_microbatches"):
            COUNT.check("Candidate", field, getattr(self, field))
        if (self.replicas > 1) != (self.slow_replicas is not None):
            raise ConfigError(
                f"got replicas={self.replicas} and slow_replicas={self.slow_replicas}; several "
                "replicas need a SlowReplicas, which says when they synchronize; one needs none",
                code="replicas-need-sync",
            )
        if known[self.strategy].has_two_axes and 1 in (self.dp, self.fsdp):
            raise ConfigError(
                f"{self.strategy} got dp={self.dp} and fsdp={self.fsdp}; it splits over fsdp and "
                "replicates over dp, so give each at least 2, or take fsdp"
            )

    @property
    def apart(self) -> SlowReplicas | None:
        """The deprecated name of `slow_replicas`."""
        text = "Candidate.apart is deprecated; use slow_replicas"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.slow_replicas

    @property
    def name(self) -> str:
        """The combined parallelisms, such as `"pp + tp + fsdp"`."""
        parts = [] if self.slow_replicas is None else [self.slow_replicas.strategy]
        parts += [a for a in AXES if a not in ("dp", "fsdp") and getattr(self, a) > 1]
        if self.shard_ranks > 1 or not parts[self.replicas > 1 :]:
            parts.append(self.strategy)
        return " + ".join(parts)

    @property
    def num_devices(self) -> int:
        """The product of all axes."""
        return self.replicas * math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """The number of pieces into which the batch is split."""
        return self.replicas * self.shard_ranks * self.ep

    @property
    def shard_ranks(self) -> int:
        """The number of ranks of the data-parallel strategy, `dp * fsdp`."""
        return self.dp * self.fsdp

    @property
    def mesh(self) -> MeshSpec:
        """The axes larger than 1, outer to inner, with at least one data axis."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        axes = {a: n for a, n in sizes.items() if n > 1 or (a == "dp" and self.shard_ranks == 1)}
        if self.slow_replicas is not None:
            axes = {self.slow_replicas.axis: self.replicas, **axes}
        return MeshSpec(axes)

    def to_config(self) -> JsonDict:
        """Returns the config sections that select this candidate, as plain data.

        Example:
            >>> Candidate(strategy="fsdp", fsdp=8, remat=True).to_config()
            {'mesh': {'fsdp': 8}, 'parallel': {'fsdp': {}}, 'remat': {'interval': 1}}
        """
        parallel: JsonDict = {}
        if self.slow_replicas is not None:
            row = STRATEGIES.over(*SLOW_AXES)[self.slow_replicas.strategy]
            parallel[self.slow_replicas.strategy] = dict(row.options(self))
        parallel[self.strategy] = {}
        for axis in _MODEL_AXES:
            if getattr(self, axis) > 1:
                name, row = next(iter(STRATEGIES.over(axis).items()))
                parallel[name] = dict(row.options(self))
        lines: JsonDict = {"mesh": self.mesh.shape, "parallel": parallel}
        if self.remat:
            lines["remat"] = {"interval": 1}
        train: JsonDict = {}
        if self.pp == 1 and self.num_microbatches > 1:
            train["accumulate"] = self.num_microbatches
        if self.slow_replicas is not None:
            # Stopping at a non-finite step would have to reach all replicas in that same step.
            train["nonfinite"] = "skip"
        if train:
            lines["train"] = train
        return lines


def candidate_for(strategy: str, num_ranks: int, **rest: Any) -> Candidate:
    """Returns the candidate with a data-parallel strategy over some ranks of its usual axis.

    Args:
        strategy: one of its names, except those of hybrid sharding, which has two sizes.
        num_ranks: data-parallel ranks.
        **rest: other fields of `Candidate`.

    Example:
        >>> str(candidate_for("zero1", 4).mesh), str(candidate_for("fsdp", 4).mesh)
        ('dp=4', 'fsdp=4')
    """
    TEXT.check("candidate_for", "strategy", strategy)
    row = STRATEGIES.of_data().get(resolve_name(strategy)[0])
    sizes: Mapping[str, Any] = {} if row is None else next(row.sizes(num_ranks, 1), {})
    return Candidate(strategy=strategy, **(sizes or {"dp": num_ranks}), **rest)


DEVICES = ArgumentKind("a number, 1 to 10^6", lambda x: COUNT.holds(x) and x <= 10**6)
_MICROBATCHES_PER_STAGE = 4
"""The number of microbatches per pipeline stage that keeps the bubble small."""


@checked(num_devices=DEVICES)
def candidates(
    work: Workload,
    num_devices: int,
    hardware: Hardware,
    slow_replicas: SlowReplicas | None = None,
    replicas: int = 1,
) -> Iterator[Candidate]:
    """Yields the candidates whose sizes divide the devices, the experts and the batch.

    Tensor, context and expert parallelism stay inside a node. Pipeline ranks gather their stage
    once per step, so sharding sends no more than replicating, and parameters are always sharded
    there. Only pipelines get several microbatches, and nothing is recomputed: the traced step shows
    whether it needs more.

    Args:
        work: the model and its batch.
        num_devices: the number of devices, all of which are used.
        hardware: gives the number of devices per node.
        slow_replicas: how replicas over slow links train between outer steps; None for a single
            model.
        replicas: the number of replicas.

    Yields:
        Candidates over `num_devices`; none unless the replicas divide both them and the batch.
    """
    if slow_replicas is not None:
        if replicas > 1 and not (num_devices % replicas or work.global_batch % replicas):
            share = dataclasses.replace(work, global_batch=work.global_batch // replicas)
            for one in candidates(share, num_devices // replicas, hardware):
                # Pipelines are not supported inside replicas that train independently.
                if one.pp == 1:
                    yield dataclasses.replace(one, slow_replicas=slow_replicas, replicas=replicas)
        return
    sizes = divisors(num_devices)
    experts = [size for size in sizes if work.num_experts % size == 0]
    for tp, pp, cp, ep in itertools.product(sizes, sizes, sizes, experts):
        split = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        if num_devices % math.prod(split.values()) or not _splits(work, split, hardware):
            continue
        ranks = num_devices // math.prod(split.values())
        if work.global_batch % (ranks * ep) == 0:
            local = work.global_batch // (ranks * ep)
            for base in _strategies(ranks, split, hardware):
                yield _with_microbatches(base, local, work.num_layers)


def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors in ascending order.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def _splits(work: Workload, split: dict[str, int], hardware: Hardware) -> bool:
    # Pipeline stages run at different times, but a ring over positions needs all ranks at once.
    can_ring = split["pp"] == 1 or split["cp"] == 1
    fits_node = split["tp"] * split["cp"] * split["ep"] <= (hardware.node_size or 8)
    return can_ring and fits_node and work.is_worth_trying(**split)


def _strategies(ranks: int, split: dict[str, int], hardware: Hardware) -> Iterator[Candidate]:
    model: dict[str, Any] = {**split, "sequence": split["tp"] > 1}
    if ranks == 1:
        yield Candidate(strategy="ddp", **model)
        return
    for name, row in STRATEGIES.of_data().items():
        if split["pp"] > 1 and not ZERO[row.stage].params:
            continue
        for sizes in row.sizes(ranks, hardware.node_size):
            # Strategies over two data axes are tried only if nothing else splits the model.
            if len(sizes) == 1 or max(split.values()) == 1:
                axes: dict[str, Any] = {**model, **sizes}
                yield Candidate(strategy=name, **axes)


def more_microbatches(candidate: Candidate, work: Workload, least: int) -> Candidate | None:
    """Returns the same candidate with smaller microbatches.

    Args:
        candidate: the candidate whose microbatches are too large.
        work: the model and its batch.
        least: the least number of microbatches wanted.

    Returns:
        The candidate with the smallest possible number of microbatches that is at least `least`, or
        with one sample per microbatch if there is none; None where the number would not grow.
    """
    counts = divisors(work.global_batch // candidate.data_ranks)
    count = next((n for n in counts if n >= least), counts[-1])
    if count <= candidate.num_microbatches:
        return None
    return dataclasses.replace(candidate, num_microbatches=count)


def first_guess(
    candidate: Candidate, work: Workload, available: float, measured: float | None = None
) -> Candidate:
    """Returns a candidate with the microbatches that it should need, estimated without a trace.

    Every axis splits the activations at best by its size, so a device keeps at least its share of
    those of the whole batch.

    Args:
        candidate: the candidate, as `candidates` makes it: one microbatch, a pipeline with several.
        work: the model and its batch.
        available: bytes that a device has for activations.
        measured: the activations of the whole batch in bytes, from the trace of another
            candidate; used instead of those of the workload. A candidate whose smallest
            microbatch needs clearly more than is available then recomputes its blocks.

    Example:
        >>> sizes = {"num_params": 10, "num_layers": 4, "flops": 60.0, "activations": 64}
        >>> work = Workload(**sizes, global_batch=16)
        >>> candidate = Candidate(strategy="ddp", dp=4)
        >>> first_guess(candidate, work, 8).num_microbatches
        2
        >>> first_guess(candidate, work, 2, 64).remat
        True
    """
    if candidate.pp > 1:  # It has several microbatches already, and its stages are recomputed.
        return candidate
    share = (work.activations if measured is None else measured) / candidate.num_devices
    counts = divisors(work.global_batch // candidate.data_ranks)
    count = next((n for n in counts if share / n <= available), counts[-1])
    is_hopeless = measured is not None and share / count > _HOPELESS * max(available, 0.0)
    return dataclasses.replace(candidate, num_microbatches=count, remat=is_hopeless)


_HOPELESS = 1.25
"""If the estimated activations exceed the available bytes by this factor, they do not fit, and no
trace is needed to see that."""


def _with_microbatches(base: Candidate, local: int, num_layers: int) -> Candidate:
    """Gives a pipeline enough microbatches to keep it busy, and the schedule that idles least."""
    if base.pp == 1:
        return base
    counts = divisors(local)
    count = next((n for n in counts if n >= _MICROBATCHES_PER_STAGE * base.pp), counts[-1])
    best = base.schedule
    least = math.inf
    for name in PipelineSchedule:
        try:
            chunks = build_schedule(name, base.pp, min(count, 2 * base.pp)).num_stages // base.pp
            idle = idle_share(name, base.pp, count)
        except ScheduleError:  # The schedule does not support these sizes.
            continue
        if num_layers % (base.pp * chunks) == 0 and idle < least:
            best = name
            least = idle
    return dataclasses.replace(base, num_microbatches=count, schedule=best)
