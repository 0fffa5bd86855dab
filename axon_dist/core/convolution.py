"""The work of a convolution, which compiled and traced programs count in the same way."""

from __future__ import annotations

import math

import numpy as np


def products_along(
    size: int,
    kernel: int,
    output: int,
    *,
    low: int = 0,
    stride: int = 1,
    dilation: int = 1,
    kernel_dilation: int = 1,
) -> int:
    """Counts the products along one dim of a convolution, without those with padding or holes.

    An element of the kernel costs nothing where it meets the padding, or a hole between two
    elements of a dilated operand, as in the gradient of a strided convolution.

    Args:
        size: the size of the operand.
        kernel: the size of the kernel.
        output: the size of the result.
        low: the padding before the operand; negative if elements are cut off.
        stride: the distance between two windows.
        dilation: the distance between two elements of the operand.
        kernel_dilation: the distance between two elements of the kernel.

    Example:
        >>> products_along(8, 3, 8, low=1)  # the first window and the last one lack an element
        22
        >>> products_along(3, 3, 7, low=2, dilation=2)  # the gradient of stride 2: 3 products each
        9
    """
    start = np.arange(output, dtype=np.int64) * stride - low
    # An array of all windows and elements would not fit in memory for kernels as long as the data.
    # So solve, for each window, start + element * kernel_dilation = 0 modulo dilation.
    common = math.gcd(kernel_dilation, dilation)
    step = dilation // common
    inverse = pow(kernel_dilation // common, -1, step)
    element = -(start // common) * inverse % step
    first = np.maximum(0, -(start // kernel_dilation))
    last = np.minimum(kernel - 1, ((size - 1) * dilation - start) // kernel_dilation)
    count = (last - element) // step - (first - 1 - element) // step
    return int(np.sum(np.maximum(count, 0)[start % common == 0]))
