"""`Plan`: a value that says which layers are split by columns, by rows or by vocabulary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from flax import nnx
from jax.sharding import PartitionSpec

from ..core.checks import TEXT
from ..core.errors import ConfigError, DivisibilityError, did_you_mean
from ..core.renamed import renamed_fields
from ..core.typing import Path, Shape
from ..core.words import pattern_error
from ..nn import ParallelMode
from ..sharding import Decision, HasShape, Policy

BIAS = ("bias", "b")
"""Leaves of these names hold one number per output feature."""

ADAPTER = ("lora_a", "lora_b")
"""The leaves of a kernel's LoRA adapter: inputs x rank, and rank x outputs."""

TABLES = ("embedding",)
"""Leaves of these names hold one row per token."""


@renamed_fields(unit="multiple_of", parts="num_fused")
@dataclasses.dataclass(frozen=True)
class Rule:
    """How the layers whose path matches a pattern are split.

    Args:
        pattern: a regular expression, searched for in the path of a module, such as
            `"blocks/0/mlp/up"`, or of a parameter outside any layer.
        mode: how they are split.
        dim: the dim of the kernel that is split, counted from the end; None is the last for
            columns, and the last but one for rows and token tables.
        multiple_of: each rank gets a multiple of this many features, such as the size of a head.
        optional: whether the layer stays whole, instead of raising, where the dim does not divide.
        num_fused: how many layers are fused in the kernel, such as 3 for queries, keys and values.
        stacked: whether the model separates the blocks by a reshape, rather than by slices.
        reason: a clause that explains the rule, for tables.

    Raises:
        ConfigError: for an unknown mode, a pattern that is not a regular expression, or a `dim`
            that is not negative.
    """

    pattern: str
    mode: ParallelMode
    dim: int | None = None
    multiple_of: int = 1
    optional: bool = False
    num_fused: int = 1
    stacked: bool = False
    reason: str = "by the plan"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "mode", ParallelMode(self.mode))
        except ValueError:
            valid = [mode.value for mode in ParallelMode]
            raise ConfigError(
                f"{self.pattern!r}: unknown mode {self.mode!r}."
                f"{did_you_mean(str(self.mode), valid)}"
            ) from None
        check_pattern(self.pattern, self.dim)

    def split_dim(self, leaf: str) -> int | None:
        """Returns the split dim, from the end, of a layer's leaf; None where it stays whole.

        Args:
            leaf: the last name of the parameter's path.
        """
        if self.mode in (ParallelMode.SEQUENCE, ParallelMode.REPLICATE):
            return None
        if leaf in BIAS and self.mode is ParallelMode.ROW:
            return None
        if leaf in ADAPTER:
            # Split along the same features as the kernel; the low-rank dim is never split.
            by_rows = self.mode is ParallelMode.ROW
            return (-2 if by_rows else -1) if leaf == ADAPTER[0 if by_rows else 1] else None
        if self.dim is not None:
            return self.dim
        by_rows = self.mode is ParallelMode.ROW or leaf in TABLES
        return -2 if by_rows else -1


def check_pattern(pattern: str, dim: int | None) -> None:
    """Raises `ConfigError` for an invalid regular expression or a dim that is not negative."""
    TEXT.check("a rule of a plan", "pattern", pattern)
    if why := pattern_error(pattern):
        raise ConfigError(
            f"{pattern!r}: this pattern {why}; fix the expression", code="invalid-pattern"
        )
    if dim is not None and dim >= 0:
        raise ConfigError(
            f"{pattern!r}: dim is {dim}; count it from the end, so that it holds for "
            "stacked layers too: -1 is the last"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """An ordered list of rules: the first match decides, and unmatched layers stay whole.

    Args:
        rules: patterns of layer paths, each with its mode.

    Example:
        >>> plan = Plan.of({"up$": "column", "down$": "row"})
        >>> plan.rule_of("blocks/0/mlp/down").mode
        <ParallelMode.ROW: 'row'>
    """

    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, plan: PlanLike) -> Plan:
        """Reads a plan, a dict from pattern to mode, or the name of a preset.

        Raises:
            ConfigError: for an unknown preset or mode.
        """
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str):
            if plan not in PRESETS:
                raise ConfigError(f"no plan is called {plan!r:.80}.{did_you_mean(plan, PRESETS)}")
            return cls.of(PRESETS[plan])
        if not isinstance(plan, Mapping):
            raise ConfigError(
                f"got a {type(plan).__name__} for a plan; give a dict from pattern to mode, "
                "such as {'up$': 'column'}, or the name of a preset"
            )
        return cls(tuple(Rule(pattern, mode) for pattern, mode in plan.items()))

    @property
    def why_whole(self) -> tuple[str, ...]:
        """The known reasons why layers without a rule stay whole, a sentence each."""
        return ()

    def rule_of(self, path: Path) -> Rule | None:
        """Returns the first rule whose pattern matches in a path."""
        return next((rule for rule in self.rules if re.search(rule.pattern, path)), None)

    def rule_of_parameter(self, path: Path) -> Rule | None:
        """Returns the rule of the layer that holds a parameter, or else of the parameter itself."""
        layer, _, _ = path.rpartition("/")
        return self.rule_of(layer) or self.rule_of(path)


PlanLike: TypeAlias = Plan | Mapping[str, Any] | str
"""A plan, a dict from pattern to mode, or the name of a preset."""


@dataclasses.dataclass(frozen=True)
class ByPlan(Policy):
    """Shards parameters over one mesh axis as a plan says.

    Args:
        plan: which layers are split by columns, by rows, or stay whole.
        axis: the mesh axis.
        label: the name that tables and conflicts show.

    Raises:
        DivisibilityError: when a dim that the plan splits does not divide.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> policy = ByPlan(Plan.of("transformer"), "tp")
        >>> policy("blocks/0/mlp/up/kernel", (64, 256), MeshSpec(tp=4))
        P(None, 'tp')
    """

    plan: Plan
    axis: str
    label: str = "tensor"  # pyrefly: ignore[bad-override]

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by the rule of the layer that holds the parameter."""
        rule = self.plan.rule_of_parameter(path)
        if rule is None:
            return Decision(PartitionSpec(), self.name, "no rule of the plan matches")
        back = rule.split_dim(path.rpartition("/")[2])
        if back is None or -back > len(shape):
            return Decision(PartitionSpec(), self.name, f"{rule.mode}: every rank holds it whole")
        dim = len(shape) + back
        size = mesh.shape[self.axis]
        if (shape[dim] // rule.multiple_of) % size or shape[dim] % rule.multiple_of:
            # The dims of a kernel may be in another order than those of its bias, which is small.
            if rule.optional or path.rpartition("/")[2] in BIAS:
                why = (
                    f"{shape[dim] // rule.multiple_of} units do not divide over {self.axis}={size}"
                )
                return Decision(PartitionSpec(), self.name, f"stays whole: {why}")
            raise indivisible(path, shape, dim, rule, self.axis, size)
        spec = PartitionSpec(*(None,) * dim, self.axis)
        return Decision(spec, self.name, f"{rule.mode}: {rule.reason}")


def plan_of(model: nnx.Module) -> Plan:
    """Returns the plan that a model's own parallel layers, such as `ColumnParallelLinear`, declare.

    Args:
        model: a model of arrays or shapes.

    Returns:
        A plan with one rule per such layer.

    Example:
        >>> from axon_dist.nn import ParallelMLP
        >>> [rule.pattern for rule in plan_of(ParallelMLP(4, 8, rngs=nnx.Rngs(0))).rules]
        ['^down$', '^up$']
    """
    declared = (
        ("/".join(map(str, keys)), getattr(module, "mode", None))
        for keys, module in nnx.iter_modules(model)
    )
    return Plan(
        tuple(
            Rule(f"^{re.escape(path)}$", mode, reason="declared by the layer")
            for path, mode in sorted(declared)
            if isinstance(mode, ParallelMode)
        )
    )


def indivisible(
    path: Path, shape: Shape, dim: int, rule: Rule, axis: str, size: int
) -> DivisibilityError:
    """Returns the error for a dim that does not divide over an axis; names the sizes that do."""
    units = shape[dim] // rule.multiple_of
    what = (
        f"features of dim {dim}"
        if rule.multiple_of == 1
        else f"heads of {rule.multiple_of} features"
    )
    valid = [n for n in range(1, units + 1) if units % n == 0][:12]
    return DivisibilityError(
        f"{path} of shape {shape}: {units} {what} do not divide over {axis}={size}; choose a size "
        f"of {axis} among {valid}, or replicate the layer in the plan"
    )


_ATTENTION = {
    r"(attention|attn|self_attn|self_attention)/(q|k|v|q_proj|k_proj|v_proj|query|key|value|"
    r"wq|wk|wv)$": "column",
    r"(attention|attn|self_attn|self_attention)/(out|o|o_proj|out_proj|wo|proj)$": "row",
}
_MLP = {
    r"(mlp|ffn|ff|feed_forward)/(gate|up|gate_proj|up_proj|w1|w3|fc1|fc|c_fc|in_proj|dense_in)$": (
        "column"
    ),
    r"(mlp|ffn|ff|feed_forward)/(down|down_proj|w2|fc2|c_proj|proj|out_proj|dense_out)$": "row",
}
_VOCAB = {
    r"(^|/)(token_embedding|tok_embeddings|embed_tokens|embed|embedder|wte|embedding)$": "vocab",
    r"(^|/)(lm_head|head|output|unembed)$": "vocab",
}
_SEQUENCE = {
    r"(norm|ln|layernorm|layer_norm|norm1|norm2|ln_1|ln_2|ln_f|dropout|drop)$": "sequence",
}

PRESETS: MappingProxyType[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention": _ATTENTION,
        "mlp": _MLP,
        "transformer": {**_ATTENTION, **_MLP, **_VOCAB, **_SEQUENCE},
    }
)
"""Plans by name, for the usual names of transformer layers."""
