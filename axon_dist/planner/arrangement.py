"""`Arrangement`: how a step is spread over devices, before there are any."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from ..core.errors import ConfigError, did_you_mean
from ..mesh import MeshSpec
from ..parallel import ZERO, ZeROStage
from ..precision import MixedPrecision
from ..schedule import PipelineSchedule

STAGES: MappingProxyType[str, ZeROStage] = MappingProxyType(
    {
        "ddp": ZeROStage.STAGE0,
        "zero1": ZeROStage.STAGE1,
        "shard_grad_op": ZeROStage.STAGE2,
        "full_shard": ZeROStage.STAGE3,
        "hybrid_shard": ZeROStage.STAGE3,
    }
)
"""The data-parallel strategies, from the one that holds most to the one that moves most."""

ALIASES: MappingProxyType[str, str] = MappingProxyType(
    {
        "no_shard": "ddp",
        "dp": "ddp",
        "zero2": "shard_grad_op",
        "zero3": "full_shard",
        "fsdp": "full_shard",
    }
)
"""Other names of the same strategies."""

_PLACES = {"ddp": "dp", "zero1": "dp", "shard_grad_op": "dp", "full_shard": "fsdp"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Axis sizes, what data-parallel ranks split, and what is recomputed.

    Args:
        strategy: a key of `STAGES` or `ALIASES`: what the ranks of `dp` and `fsdp` split;
            `hybrid_shard` splits over `fsdp` and replicates over `dp`.
        pp: stages of the pipeline.
        dp: ranks that split the batch.
        fsdp: ranks that split the batch and, usually, the parameters.
        cp: ranks of context parallelism, which split the positions of a sample.
        tp: ranks of tensor parallelism.
        num_microbatches: pieces of a step's batch on a rank.
        remat: whether the blocks are recomputed in the backward pass.
        sequence: whether tensor parallelism splits positions between its products.
        schedule: of the pipeline. In a step that is one scan, a tick lasts as long as its slowest
            rank, and the eager 1F1B fills more of it than 1F1B does.

    Raises:
        ConfigError: for an unknown strategy or schedule, a size below 1, or `hybrid_shard` without
            two axes.

    Example:
        >>> arrangement = Arrangement(strategy="fsdp", pp=8, fsdp=16, tp=8)
        >>> arrangement.name, str(arrangement.mesh)
        ('pp + tp + full_shard', 'pp=8,fsdp=16,tp=8')
    """

    strategy: str = "ddp"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    num_microbatches: int = 1
    remat: bool = False
    sequence: bool = False
    schedule: str = PipelineSchedule.EAGER_1F1B

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", ALIASES.get(self.strategy, self.strategy))
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless names are known and sizes positive."""
        if self.strategy not in STAGES:
            names = [*STAGES, *ALIASES]
            raise ConfigError(
                f"unknown strategy {self.strategy!r}.{did_you_mean(self.strategy, names)}"
            )
        if self.schedule not in list(PipelineSchedule):
            raise ConfigError(
                f"unknown schedule {self.schedule!r}."
                f"{did_you_mean(self.schedule, list(PipelineSchedule))}"
            )
        for field in ("pp", "dp", "fsdp", "cp", "tp", "num_microbatches"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 1; set it so")
        if self.strategy == "hybrid_shard" and 1 in (self.dp, self.fsdp):
            raise ConfigError(
                f"hybrid_shard got dp={self.dp} and fsdp={self.fsdp}; it splits over fsdp and "
                "replicates over dp, so give each at least 2, or take full_shard"
            )

    @property
    def name(self) -> str:
        """What is combined, such as `"pp + tp + full_shard"`."""
        parts = [axis for axis in ("pp", "cp", "tp") if getattr(self, axis) > 1]
        if self.data_ranks > 1 or not parts:
            parts.append(self.strategy)
        return " + ".join(parts)

    @property
    def num_devices(self) -> int:
        """The product of all axes."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Into how many pieces the batch is split."""
        return self.dp * self.fsdp

    @property
    def model_ranks(self) -> int:
        """Into how many pieces layers and their parts are split."""
        return self.pp * self.tp

    @property
    def num_shards(self) -> int:
        """Over how many data ranks an array that is split lies."""
        return self.fsdp if self.strategy == "hybrid_shard" else self.data_ranks

    @property
    def shards(self) -> tuple[int, int, int]:
        """Into how many pieces the data ranks split parameters, gradients, optimizer state.

        Gradients as they are held between microbatches: the stages of a pipeline hold theirs whole.
        """
        split = ZERO[STAGES[self.strategy]]
        return tuple(  # type: ignore[return-value]
            self.num_shards if is_split else 1
            for is_split in (split.params, split.grads and self.pp == 1, split.opt_state)
        )

    def shards_for(self, policy: MixedPrecision) -> tuple[int, int, int]:
        """The same under a policy: what is computed in a narrower dtype has its masters split.

        Where only the moments are split, parameters lie with them, and are gathered once a step in
        the dtype of the compute (`with_masters`).

        Args:
            policy: the dtypes.
        """
        params, grads, state = self.shards
        return state if self.keeps_masters(policy) else params, grads, state

    def keeps_masters(self, policy: MixedPrecision) -> bool:
        """Whether parameters lie split with their moments though every rank computes with all."""
        params, _, state = self.shards
        return params < state and self.pp == 1 and policy.compute.itemsize < policy.param.itemsize

    @property
    def splits_params(self) -> bool:
        """Whether parameters are gathered where they are used."""
        return self.shards[0] > 1

    @property
    def mesh(self) -> MeshSpec:
        """The axes larger than 1, outer to inner, and one data axis at least."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "dp", "fsdp", "cp", "tp")}
        kept = {axis: size for axis, size in sizes.items() if size > 1}
        if self.data_ranks == 1:
            kept = {"pp": self.pp, "dp": 1, "cp": self.cp, "tp": self.tp}
            kept = {axis: size for axis, size in kept.items() if size > 1 or axis == "dp"}
        return MeshSpec(kept)

    def to_config(self) -> dict[str, Any]:
        """The lines of a config that make this arrangement, as plain data.

        Example:
            >>> Arrangement(strategy="full_shard", fsdp=8, remat=True).to_config()
            {'mesh': {'fsdp': 8}, 'parallel': {'full_shard': {}}, 'remat': {'interval': 1}}
        """
        parallel: dict[str, Any] = {self.strategy: {}}
        if self.cp > 1:
            parallel["context"] = {}
        if self.tp > 1:
            parallel["tensor"] = {"sequence": True} if self.sequence else {}
        if self.pp > 1:
            parallel["pipeline"] = {
                "num_microbatches": self.num_microbatches,
                "schedule": str(self.schedule),
            }
        lines: dict[str, Any] = {"mesh": self.mesh.shape, "parallel": parallel}
        if self.remat:
            lines["remat"] = {"interval": 1}
        if self.pp == 1 and self.num_microbatches > 1:
            lines["train"] = {"accumulate": self.num_microbatches}
        return lines


def arrange(strategy: str, num_ranks: int, **rest: Any) -> Arrangement:
    """A data-parallel strategy over some ranks, on the axis where it usually lies.

    Args:
        strategy: a name of `STAGES` or `ALIASES`, hybrid sharding excepted, which needs two sizes.
        num_ranks: data-parallel ranks.
        **rest: other fields of `Arrangement`.

    Example:
        >>> str(arrange("zero1", 4).mesh), str(arrange("fsdp", 4).mesh)
        ('dp=4', 'fsdp=4')
    """
    axis = _PLACES.get(ALIASES.get(strategy, strategy), "dp")
    return Arrangement(strategy=strategy, **{axis: num_ranks}, **rest)
