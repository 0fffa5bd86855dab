"""The rates that kernels reach on a chip: a table with the date, source and command of each row.

A data sheet gives the peak rates of a chip. Kernels reach less, depending on their shapes. The time
of a step is computed from these rates and from what its kernels multiply and move; no rate here is
fitted to the time of a step. `inspect.model_time` adds up a compiled program,
`planner.Reading.step_time` a traced one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from types import MappingProxyType

from .chips import HARDWARE, Hardware


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """The matmuls of one kernel: `batch` times `[rows, summed] @ [summed, columns]`.

    Args:
        rows: the rows of the result.
        columns: the columns of the result.
        summed: the size of the contracted dim.
        batch: the number of independent matmuls.
        written: bytes per element of the result.
        read: bytes per element of the operands.

    Example:
        >>> ProductShape(8, 4, 2).flops
        128
    """

    rows: int
    columns: int
    summed: int
    batch: int = 1
    written: int = 2
    read: int = 2

    @property
    def flops(self) -> int:
        """FLOPs: multiplications and additions."""
        return 2 * self.batch * self.rows * self.columns * self.summed


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One pass of fused attention.

    Args:
        flops: the FLOPs of its matmuls over all pairs of positions, masked or not.
        length: the number of keys.
        head_dim: the size of a head.
        is_backward: whether it is the backward pass.
        is_causal: whether later positions are masked.
    """

    flops: float
    length: int
    head_dim: int
    is_backward: bool
    is_causal: bool = True


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates that kernels reach on a chip.

    Args:
        products: FLOP/s of bfloat16 matmuls while the matrix units have operands.
        memory: bytes/s of a kernel that streams through memory.
        cores: processors that each compute a tile of a matmul; 0 if matmuls are not tiled.
        start: the latency until a tile has its first operands, in seconds, without the transfer.
        gap: seconds between two kernels.
        transfer_cores: processors that a transfer takes from the compute it overlaps.
        source: the source of the numbers.

    Example:
        >>> rates = Rates(products=834.7e12, memory=3.07e12, cores=132, start=1e-6)
        >>> square = ProductShape(8192, 8192, 8192)
        >>> round(square.flops / rates.product_seconds(square) / 1e13)
        76
    """

    products: float
    memory: float
    cores: int = 0
    start: float = 0.0
    gap: float = 0.0
    transfer_cores: int = 0
    source: str = ""

    def slowdown(self, hidden: float) -> float:
        """The seconds that compute loses because hidden transfers use some of the processors.

        Args:
            hidden: seconds of transfers that run while the device computes.

        Example:
            >>> rates = Rates(products=834.7e12, memory=3.07e12, cores=132, transfer_cores=24)
            >>> round(rates.slowdown(0.1), 4)
            0.0182
        """
        return hidden * self.transfer_cores / self.cores if self.cores else 0.0

    def memory_seconds(self, num_bytes: float) -> float:
        """The time of a memory-bound kernel that reads and writes this many bytes."""
        return num_bytes / self.memory

    def product_seconds(self, shape: ProductShape, rate: float = 1.0) -> float:
        """The time of matmuls, computed in waves of tiles.

        A processor idles while it waits for the first operands of a tile and while it writes the
        result; some processors idle in the last wave of tiles. The fastest of the usual tile sizes
        counts. If there are few tiles with a long contraction, it may be split (split-K).

        Args:
            shape: the matmuls.
            rate: the rate of the dtype, relative to bfloat16.
        """
        if min(shape.rows, shape.columns, shape.summed, shape.batch) < 1:
            return 0.0
        if not self.cores:
            return shape.flops / (self.products * rate)
        # A matmul takes as long as its transpose.
        long, wide = sorted((shape.rows, shape.columns), reverse=True)
        return min(
            self._tiled(dataclasses.replace(shape, rows=long, columns=wide), *tile, splits, rate)
            for tile, splits in itertools.product(_TILES, _SPLITS)
            if splits == 1 or shape.summed >= splits * _LEAST_SUM
        )

    def _tiled(
        self, shape: ProductShape, rows: int, columns: int, splits: int, rate: float
    ) -> float:
        tiles = math.ceil(shape.rows / rows) * math.ceil(shape.columns / columns)
        waves = math.ceil(shape.batch * tiles * splits / self.cores)
        each = 2 * rows * columns * shape.summed / splits * self.cores / (self.products * rate)
        part = _PARTIAL if splits > 1 else shape.written
        moved = rows * columns * part + (rows + columns) * _STAGE * shape.read
        total = waves * (each + self.start + moved * self.cores / self.memory)
        if splits > 1:
            result = shape.batch * shape.rows * shape.columns
            total += self.memory_seconds(result * (splits * _PARTIAL + shape.written)) + self.gap
        return total

    def attention_seconds(self, shape: AttentionShape) -> float:
        """The time of fused attention, from published rates for its length and head size.

        Example:
            >>> rates = Rates(products=834.7e12, memory=3.07e12)
            >>> shape = AttentionShape(4e12, length=2048, head_dim=128, is_backward=False)
            >>> round(2e12 / rates.attention_seconds(shape) / 1e12)  # half of the pairs are masked
            484
        """
        rate = attention_rate(shape) * self.products / RATES["h100"].products
        return shape.flops * (0.5 if shape.is_causal else 1.0) / rate


_TILES = ((128, 256), (128, 128), (64, 256))
"""Rows and columns of matmul tiles, as in CUTLASS and cuBLAS for Hopper."""

_SPLITS = (1, 2, 4, 8, 16)
"""The numbers of parts into which a contraction may be split to fill the chip (split-K)."""

_LEAST_SUM = 512
"""The shortest part of a split contraction."""

_STAGE = 64
"""The length of the contraction in one stage of a tile's pipeline."""

_PARTIAL = 4
"""Bytes per element of the partial results of a split contraction."""

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

ATTENTION: MappingProxyType[tuple[int, bool], tuple[float, ...]] = MappingProxyType(
    {
        (64, False): (335e12, 373e12, 395e12, 408e12, 412e12, 413e12),
        (128, False): (497e12, 574e12, 617e12, 609e12, 600e12, 595e12),
        (64, True): (266e12, 348e12, 395e12, 417e12, 432e12, 433e12),
        (128, True): (305e12, 408e12, 465e12, 499e12, 518e12, 516e12),
    }
)
"""FLOP/s of cuDNN's attention without a mask on an H100 SXM5, at lengths of 512 to 16 384, by head
size and whether it is the backward pass. Source: FlashAttention-3, arXiv:2407.08608, figures 5 and
6, July 2024; a batch has 16 384 positions."""

CAUSAL: tuple[float, ...] = (0.634, 0.714, 0.784, 0.851, 0.882, 0.906)
"""The fraction of these rates with a causal mask, counting half of the pairs: of the same source,
forward pass, head size 128. It is low for short sequences, which are mostly diagonal tiles."""


def attention_rate(shape: AttentionShape) -> float:
    """FLOP/s of attention on an H100, counting unmasked pairs, interpolated between lengths.

    Example:
        >>> wide = AttentionShape(0, 2048, 128, is_backward=True, is_causal=False)
        >>> attention_rate(wide) / 1e12
        465.0
    """
    width = 64 if shape.head_dim < 96 else 128
    rates = ATTENTION[width, shape.is_backward]
    place = math.log2(max(1, shape.length) / _LENGTHS[0])
    place = min(max(place, 0.0), len(_LENGTHS) - 1.0)
    low = min(int(place), len(_LENGTHS) - 2)

    def between(values: tuple[float, ...]) -> float:
        return values[low] + (values[low + 1] - values[low]) * (place - low)

    # A head that is smaller than a kernel's tile fills only a part of it.
    filled = min(1.0, shape.head_dim / width)
    return between(rates) * (between(CAUSAL) if shape.is_causal else 1.0) * filled


_TRANSFER_CORES = 24
"""The SMs of a GPU on which a collective of NCCL runs between GPUs of one node."""

RATES: MappingProxyType[str, Rates] = MappingProxyType(
    {
        "h100": Rates(
            products=834.7e12,
            memory=3.07e12,
            cores=132,
            start=1e-6,
            gap=0.9e-6,
            transfer_cores=_TRANSFER_CORES,
            # A burst of 27 ms reached 805 TFLOP/s in 8192 x 8192 x 8192, where this rate gives 757:
            # after some seconds the power limit lowers the clock, and steps run for hours.
            source="products: 780 TFLOP/s of bfloat16 4224 x 8192 x 2048, repeated for 10 s, H100, "
            "gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405, 2024; memory: STREAM triad "
            "of an H100 80GB HBM3, published, 2026; gap: kernels launched ahead, NVIDIA, 'Getting "
            "started with "
            "CUDA graphs', 2019; attention: arXiv:2407.08608, 2024; transfers: 24 blocks of NCCL's "
            "all-gather, forums.developer.nvidia.com 337991, 2025",
        )
    }
)
"""Measured rates, by the name of the chip's row in `chips.HARDWARE`."""

_CORES: MappingProxyType[str, int] = MappingProxyType(
    {"8.0": 108, "9.0": 132, "10.0": 148, "10.3": 160}
)
"""The number of SMs of a GPU by compute capability, from NVIDIA's data sheets."""


@functools.cache
def rates_of(machine: Hardware) -> Rates:
    """The rates of a chip; an unmeasured one is assumed to reach the same share of peak as H100s.

    Example:
        >>> from axon_dist.mesh.chips import hardware
        >>> h200 = rates_of(hardware("h200"))
        >>> h200.products == rates_of(hardware("h100")).products, round(h200.memory / 1e12, 2)
        (True, 4.4)
    """
    if machine.name in RATES:
        return RATES[machine.name]
    measured, sheet = RATES["h100"], HARDWARE["h100"]
    return Rates(
        products=machine.flops * measured.products / sheet.flops,
        memory=machine.memory_bandwidth * measured.memory / sheet.memory_bandwidth,
        cores=_CORES.get(machine.capability, 0),
        start=measured.start,
        gap=measured.gap if machine.capability else 0.0,
        transfer_cores=measured.transfer_cores if machine.capability else 0,
        source=f"not measured: the shares of its peaks that an H100 reaches; {measured.source}",
    )
