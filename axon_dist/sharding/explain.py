"""Why every array lies where it does: a table of decisions, and the check that they came true."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import Counter
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console
from rich.table import Table

from ..core.errors import ClaimError
from ..core.tree import leaves_with_paths
from ..core.typing import Leaf, Path, PyTree, Shape
from .apply import optimizer_decisions
from .policy import Decision, HasShape, Policy, shard_count


@dataclasses.dataclass(frozen=True)
class LeafDecision:
    """What was decided about one array.

    Args:
        path: where it lives.
        shape: its global shape.
        dtype: its element type.
        bytes: bytes of the whole array.
        ways: into how many shards it is cut.
        decision: the spec, the rule that decided, and why.
    """

    path: Path
    shape: Shape
    dtype: str
    bytes: int
    ways: int
    decision: Decision

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec."""
        return self.decision.spec

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one shard."""
        return self.bytes // self.ways


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions about all arrays of a tree; prints as a table.

    Args:
        rows: one for each leaf, in the order of the tree.
        title: what the tree is.
    """

    rows: tuple[LeafDecision, ...]
    title: str = "layout"

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def whole(self) -> tuple[LeafDecision, ...]:
        """The rows that every device holds whole; the reason is theirs."""
        return tuple(row for row in self.rows if row.ways == 1)

    def check(self, tree: PyTree) -> None:
        """Raises unless the arrays lie as decided: what was claimed is what there is.

        Args:
            tree: the arrays, or `ShapeDtypeStruct`s with the shardings of a compiled program.

        Raises:
            ClaimError: naming the bytes, and the leaves that are held by more devices.
        """
        leaves = leaves_with_paths(tree)
        found = [shard_bytes(leaf) for _, leaf in leaves]
        wrong = [
            f"{row.path} {row.shape} holds {held:,} bytes as {_spec_of(leaf)} instead of "
            f"{row.bytes_per_device:,} as {row.spec}"
            for row, (_, leaf), held in zip(self.rows, leaves, found, strict=True)
            if held > row.bytes_per_device
        ]
        if wrong:
            more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ClaimError(
                f"{self.title}: a device holds {sum(found):,} bytes, and {self.bytes_per_device:,} "
                f"of {self.bytes:,} are claimed; lay the arrays out by the strategy's shardings:"
                + "".join(f"\n  {line}" for line in wrong[:5])
                + more
            )

    def table(self) -> Table:
        """The decisions as a table for a terminal."""
        table = Table(title=self.title)
        for column in ("leaf", "shape", "dtype", "spec", "bytes per device", "rule", "why"):
            table.add_column(column, justify="right" if "bytes" in column else "left")
        for row in self.rows:
            decided = (f"{row.bytes_per_device:,}", row.decision.rule, row.decision.reason)
            table.add_row(row.path, str(row.shape), row.dtype, str(row.spec), *decided)
        table.add_section()
        share = f"{self.bytes_per_device / max(self.bytes, 1):.1%} of {self.bytes:,}"
        table.add_row("total", "", "", "", f"{self.bytes_per_device:,}", "", share)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def explain(policy: Policy, tree: PyTree, mesh: HasShape, title: str = "layout") -> Explanation:
    """Tells where a policy lays every array of a tree, which rule decided, and why.

    Args:
        policy: the policy, such as `strategy.params`.
        tree: arrays or `ShapeDtypeStruct`s.
        mesh: anything with named axes; no device is needed.
        title: what the tree is.

    Returns:
        The decisions.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> leaf = jax.ShapeDtypeStruct((64, 256), "float32")
        >>> found = explain(LargestDim(("fsdp",)), {"kernel": leaf}, MeshSpec(fsdp=4))
        >>> found.rows[0].decision.reason, found.bytes, found.bytes_per_device
        ('dim 1 of (64, 256) split 4 ways', 65536, 16384)
    """
    rows = [
        _row(path, leaf, policy.decide(path, tuple(leaf.shape), mesh), mesh)
        for path, leaf in leaves_with_paths(tree)
    ]
    return Explanation(tuple(rows), title)


def explain_optimizer(
    policy: Policy, params: PyTree, opt_state: PyTree, mesh: Mesh, title: str = "optimizer state"
) -> Explanation:
    """As `explain`, of an optax state: moments lie as their parameter would."""
    decisions = jax.tree.leaves(optimizer_decisions(policy, params, opt_state, mesh))
    rows = [
        _row(path, leaf, decision, mesh)
        for (path, leaf), decision in zip(leaves_with_paths(opt_state), decisions, strict=True)
    ]
    return Explanation(tuple(rows), title)


def shard_bytes(leaf: Leaf) -> int:
    """Bytes of one array on the device that holds most of it, measured where there is an array."""
    if not isinstance(leaf, jax.Array):
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    held: Counter[Any] = Counter()
    for shard in leaf.addressable_shards:
        held[shard.device] += shard.data.nbytes
    return max(held.values(), default=0)


def _row(path: Path, leaf: Leaf, decision: Decision, mesh: HasShape) -> LeafDecision:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    ways = shard_count(decision.spec, mesh)
    return LeafDecision(path, tuple(leaf.shape), str(leaf.dtype), size, ways, decision)


def _spec_of(leaf: Leaf) -> str:
    return str(getattr(leaf.sharding, "spec", type(leaf.sharding).__name__))
