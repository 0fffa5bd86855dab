"""Metrics that couple samples, of which the parts of a batch do not give that of the whole."""

from __future__ import annotations

from ..core.errors import UnsupportedError
from ..jaxpr.sample_use import SampleUse


def check_metrics(use: SampleUse, microbatches: int, ranks: int) -> None:
    """Raises where a metric of the whole batch is no mean or sum of those of its parts.

    A loss that couples samples itself is one of microbatches, and so are its metrics.

    Args:
        use: what the loss function makes of the samples.
        microbatches: into how many a batch is cut.
        ranks: into how many parts each of these is cut.

    Raises:
        UnsupportedError: naming the metric, what couples the samples, and how to say it.
    """
    if microbatches * ranks == 1 or not use.loss.is_separable:
        return
    for name, found in use.metrics.items():
        if not found.is_separable:
            where = f" ({found.where})" if found.where else ""
            parts = f"{microbatches} microbatches" + (f" on {ranks} ranks" if ranks > 1 else "")
            raise UnsupportedError(
                f"the metric {name!r} {found.why}{where}, and the mean of those of {parts} is not "
                "that of the whole batch. Return what adds up: Weighted(total, weight) for a "
                "quotient, sums such as counts of hits and misses as metrics of their own, or the "
                "mean whose function it is, and compute the rest of these after the step; or use "
                "one microbatch; or build_train_step(separable=True) for the mean over the parts"
            )
