"""`MeshSpec`: named axes and their sizes, without devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from ..core.arguments import COUNT, is_whole
from ..core.errors import MeshError, did_you_mean
from ..core.words import plural

_COUNT = dataclasses.replace(COUNT, error=MeshError)

SLOW_AXES = ("pods", "nodes")
"""The axes over slow links. In a mesh that has one of them, the other axes stay within a node."""

AXIS_ORDER = (*SLOW_AXES, "pp", "dp", "fsdp", "cp", "ep", "tp")
"""The axes of this library, outer to inner; inner axes send most and need the fastest links."""


class _Located(Protocol):
    """A device, or the description of one."""

    @property
    def process_index(self) -> int: ...


_Device = TypeVar("_Device", bound=_Located)


@dataclasses.dataclass(frozen=True, init=False)
class MeshSpec:
    """Named mesh axes and their sizes, outer to inner; at most one size may be -1.

    Ranks are row-major, so the last axis varies fastest: with `dp=2,pp=2,tp=2` the rank
    `4*dp + 2*pp + tp` is at `(dp, pp, tp)`, and the tp groups are `[0, 1], [2, 3], ...`. Axes keep
    the order in which they are given. Size -1 stands for all devices that the other axes leave.

    Args:
        axes: a mapping or a string such as `"dp=4,tp=2"`, instead of keywords.
        **sizes: one keyword per axis.

    Raises:
        MeshError: for an unknown axis, a size of 0 or below -1, two sizes of -1, or no axis.

    Example:
        >>> spec = MeshSpec(dp=-1, tp=2)
        >>> str(spec.resolve(8))
        'dp=4,tp=2'
        >>> MeshSpec.parse("dp=4,tp=2") == spec.resolve(8)
        True
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: AxesLike | None = None, /, **sizes: int):
        if axes is not None and sizes:
            raise MeshError(
                f"got both {axes!r} and the keywords {sizes}; give the axes in one of the two ways"
            )
        items = _axis_items(axes) if axes is not None else tuple(sizes.items())
        # NumPy's integers become Python's, which JSON can represent.
        plain = tuple((name, int(size) if is_whole(size) else size) for name, size in items)
        object.__setattr__(self, "axes", plain)
        self.validate()

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Reads what `str` prints: `"dp=4,tp=2"`."""
        return cls(text)

    def validate(self) -> None:
        """Raises `MeshError` unless every axis is known, named once, and has a possible size."""
        if not self.axes:
            raise MeshError("got a mesh without axes; name at least one, such as dp=-1")
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not isinstance(name, str) or name not in AXIS_ORDER:
                raise MeshError(
                    f"unknown mesh axis {name!r:.80}.{did_you_mean(str(name), AXIS_ORDER)}"
                )
            if names.count(name) > 1:
                raise MeshError(f"mesh axis {name!r} is named twice in {names}; name it once")
            if not is_whole(size) or size == 0 or size < -1:
                raise MeshError(
                    f"mesh axis {name!r} has size {size!r:.80}; it must be a positive number, or "
                    "-1 for one axis, which takes the remaining devices"
                )
        unknown = [name for name, size in self.axes if size == -1]
        if len(unknown) > 1:
            raise MeshError(f"axes {unknown} all have size -1; give it to only one of them")

    def resolve(self, num_devices: int) -> MeshSpec:
        """Fills in the size -1 and checks the product.

        Args:
            num_devices: the number of devices, all of which the mesh must cover.

        Returns:
            The same axes with positive sizes whose product is `num_devices`.

        Raises:
            MeshError: if the sizes do not multiply to the number of devices.
        """
        _COUNT.check("MeshSpec.resolve", "num_devices", num_devices)
        known = math.prod(size for _, size in self.axes if size != -1)
        inferred = any(size == -1 for _, size in self.axes)
        if (inferred and num_devices % known) or (not inferred and known != num_devices):
            fits = [
                self.shape | {name: num_devices * size // known}
                for name, size in self.axes
                if size != -1 and num_devices * size % known == 0
            ]
            needed = f"a multiple of {known} devices" if inferred else plural(known, "device")
            raise MeshError(
                f"mesh {self} needs {needed} and got {num_devices}; the sizes must multiply to the "
                f"number of devices. Change a size"
                f"{f', as in mesh={MeshSpec(fits[0])}' if fits else ''}, "
                f"{'' if inferred else 'give one axis the size -1, '}"
                f"or emulate other devices: devices.emulate={known}, in Python "
                f"World.emulate({known})"
            )
        rest = num_devices // known
        return MeshSpec({name: rest if size == -1 else size for name, size in self.axes})

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names, outer to inner."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The axis sizes, outer to inner."""
        return tuple(size for _, size in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by name."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """The number of devices; raises if an axis has size -1."""
        if -1 in self.sizes:
            raise MeshError(f"mesh {self} has an axis of size -1; call resolve(num_devices) first")
        return math.prod(self.sizes)

    def __getitem__(self, name: str) -> int:
        if name not in self.shape:
            raise MeshError(f"mesh {self} has no axis {name!r}.{did_you_mean(name, self.names)}")
        return self.shape[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"MeshSpec({self})"


AxesLike: TypeAlias = MeshSpec | Mapping[str, int] | str | tuple[tuple[str, int], ...]
"""Anything that `MeshSpec` reads: a spec, a mapping, `"dp=4,tp=2"`, or pairs."""


def _axis_items(axes: AxesLike) -> tuple[tuple[str, int], ...]:
    if isinstance(axes, MeshSpec):
        return axes.axes
    if isinstance(axes, str):
        text = axes.rstrip().removesuffix(",")
        return tuple(_parse_axis(part, axes) for part in text.split(",")) if text.strip() else ()
    pairs = axes.items() if isinstance(axes, Mapping) else axes
    try:
        return tuple((name, size) for name, size in pairs)
    except (TypeError, ValueError):
        raise MeshError(
            f"got {axes!r:.80}, a {type(axes).__name__}, for the axes of a mesh; write 'dp=4,tp=2' "
            "or {'dp': 4, 'tp': 2}"
        ) from None


def _parse_axis(part: str, text: str) -> tuple[str, int]:
    name, _, size = part.partition("=")
    if re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", size) is None:
        raise MeshError(
            f"cannot read {part.strip()!r:.80} in mesh {text!r:.80}; write axes as name=size, "
            "separated by commas: 'dp=4,tp=2'"
        )
    return name.strip(), int(size)


def by_links(spec: MeshSpec, devices: Sequence[_Device]) -> list[list[_Device]]:
    """Divides devices among the ranks of the slow axes, so that no other axis leaves a node.

    A node is a slice in JAX's terms: devices that reach each other without the network. If all
    devices are of one slice, a node is the devices of one process or of several consecutive ones.

    Args:
        spec: resolved axes; those of `SLOW_AXES` come first.
        devices: as many as the mesh has.

    Returns:
        The devices of each rank along the slow axes, with those of a node consecutive. One list of
        all devices if the mesh has no slow axis, or there is only one node.

    Example:
        >>> from types import SimpleNamespace
        >>> spread = [SimpleNamespace(id=n, slice_index=n % 2, process_index=0) for n in range(4)]
        >>> [[d.id for d in part] for part in by_links(MeshSpec("nodes=2,fsdp=2"), spread)]
        [[0, 2], [1, 3]]
    """
    slow = [axis for axis in spec.names if axis in SLOW_AXES and spec[axis] > 1]
    if not slow:
        return [list(devices)]
    fast = [axis for axis in spec.names if axis not in SLOW_AXES]
    if list(spec.names[: len(spec.names) - len(fast)]) != [a for a in spec.names if a in SLOW_AXES]:
        raise MeshError(
            f"mesh {spec} has {slow[0]!r} behind another axis; axes over slow links must come "
            f"first: {','.join(f'{a}={spec[a]}' for a in [*slow, *fast])}"
        )
    kind, nodes = _nodes(devices)
    if len(nodes) == 1:
        return [list(devices)]
    within = math.prod(spec[axis] for axis in fast)
    size = len(nodes[0])
    sizes = sorted({len(node) for node in nodes})
    fits = size % within == 0 or (kind == "process" and within % size == 0)
    if len(sizes) > 1 or not fits:
        axes = "×".join(f"{axis}={spec[axis]}" for axis in fast) or "1"
        raise MeshError(
            f"mesh {spec} needs {axes} = {within} devices within a node, but there are "
            f"{len(nodes)} {_PLURAL[kind]} of {' or '.join(map(str, sizes))} devices; give "
            f"{' × '.join(slow)} the size {len(nodes)}, or a multiple of it, and let the product "
            "of the other axes be the number of devices in a node"
        )
    ordered = [device for node in nodes for device in node]
    return [ordered[start : start + within] for start in range(0, len(ordered), within)]


_PLURAL = {"slice": "slices", "process": "processes"}


def _nodes(devices: Sequence[_Device]) -> tuple[str, list[list[_Device]]]:
    """The kind of a node, slice or process, and the devices of each node."""
    slices = [getattr(device, "slice_index", None) for device in devices]
    kind, keys = "slice", slices
    if len(set(slices)) < 2:
        kind, keys = "process", [device.process_index for device in devices]
    by_node: dict[int | None, list[_Device]] = {}
    for key, device in zip(keys, devices, strict=True):
        by_node.setdefault(key, []).append(device)
    return kind, list(by_node.values())
