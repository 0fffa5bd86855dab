"""Draws what each device stores under a strategy, as SVG: `python docs/pictures.py fsdp`."""

import dataclasses
import sys
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of array, cut into `pieces`; device d stores piece `d // stride % pieces`."""

    name: str
    pieces: int = 1
    stride: int = 1

    def piece(self, device: int) -> int:
        """The piece that a device stores."""
        return device // self.stride % self.pieces


STATE = ("parameters", "gradients", "optimizer state")
BATCH = Row("batch", 4)
PICTURES = {
    "ddp": (*map(Row, STATE), BATCH),
    "zero1": (Row("parameters"), Row("gradients"), Row("optimizer state", 4), BATCH),
    "zero2": (Row("parameters"), Row("gradients", 4), Row("optimizer state", 4), BATCH),
    "fsdp": (*(Row(name, 4) for name in STATE), BATCH),
    "hybrid": (*(Row(name, 2) for name in STATE), BATCH),
    "tensor": (
        Row("column-parallel weight", 2),
        Row("row-parallel weight", 2),
        Row("norms", 1),
        Row("positions, sequence=True", 2),
        Row("batch", 2, 2),
    ),
    "context": (*map(Row, ("parameters", "gradients")), Row("positions", 2), Row("batch", 2, 2)),
    "expert": (Row("experts", 4), Row("other parameters"), BATCH),
    "slow": (Row("parameters, a replica per 2", 2), Row("outer parameters", 2), BATCH),
    "pipeline": (Row("blocks", 4), Row("microbatches")),
}
"""Four devices: two nodes of two for hybrid and slow, two groups of two ranks for tensor
and context."""
COLORS = ("#5e97e0", "#e5a83c", "#5fb766", "#b48ae0")
WHOLE = "#8fa3ad"
_TOP, _WIDE, _HIGH, _GAP = 34, 76, 18, 10
"""In pixels. Four devices are as wide as a phone's page, so that no letter has to shrink."""
_NAME = 18
"""The height of a row's name, which is above its bars."""


def svg(rows: tuple[Row, ...], devices: int = 4) -> Iterator[str]:
    """The lines of a picture: a row for each kind of array, a column for each device.

    A piece that a device stores is filled, in the color of the piece; the rest is an outline.
    """
    width = devices * (_WIDE + _GAP)
    height = _TOP + len(rows) * (_NAME + _HIGH + _GAP)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" class="picture" role="img" font-size="13">'
    )
    for device in range(devices):
        x = device * (_WIDE + _GAP)
        yield f'<text x="{x}" y="20" fill="currentColor">device {device}</text>'
    for number, row in enumerate(rows):
        y = _TOP + number * (_NAME + _HIGH + _GAP) + _NAME
        yield f'<text x="0" y="{y - 5}" fill="currentColor">{row.name}</text>'
        for device in range(devices):
            x = device * (_WIDE + _GAP)
            yield (
                f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" fill="none" '
                'stroke="currentColor" stroke-opacity="0.35"/>'
            )
            part = _WIDE / row.pieces
            color = WHOLE if row.pieces == 1 else COLORS[row.piece(device)]
            yield (
                f'<rect x="{x + part * row.piece(device):g}" y="{y}" width="{part:g}" '
                f'height="{_HIGH}" fill="{color}"/>'
            )
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(svg(PICTURES[sys.argv[1]])))
