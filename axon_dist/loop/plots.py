"""The loss curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .extras import require

Curve: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of step and value."""

_TRAIN, _VALIDATION, _INK, _GRID = "#9ab6d6", "#c1440e", "#333333", "#e6e6e6"


def plot_losses(
    path: str | Path,
    train: Curve,
    validation: Curve,
    unit: str,
    title: str,
    metrics: Mapping[str, tuple[Curve, Curve]] | None = None,
) -> None:
    """Draws training and validation loss over the steps into a PNG file, and metrics below them.

    Args:
        path: of the PNG file, replaced if it is there.
        train: training loss by step.
        validation: validation loss by step, few points.
        unit: of the loss, such as `nats/byte`.
        title: stands above the axes.
        metrics: of each further metric its training and validation curve, a panel for each.

    Raises:
        ConfigError: when matplotlib is not installed.
    """
    # Figure instead of pyplot: no window, no global state, and the user's backend is left alone.
    figure = require("matplotlib.figure", "plots", "the loss plot").Figure(
        figsize=(8, 4.5 + 2.5 * len(metrics or {})), dpi=150, layout="constrained"
    )
    panels = {f"loss ({unit})": (train, validation), **(metrics or {})}
    heights = [1.8] + [1.0] * len(metrics or {})
    rows = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (label, curves) in zip(rows, panels.items(), strict=True):
        _draw(axes, label, *curves)
    rows[0].set_title(title, loc="left", color=_INK, fontweight="bold")
    rows[0].legend(frameon=False)
    rows[-1].set_xlabel("step", color=_INK)
    figure.savefig(path)


def _draw(axes: Any, label: str, train: Curve, validation: Curve) -> None:
    axes.plot(*_columns(train), color=_TRAIN, linewidth=1.4, label="training")
    if validation:
        steps, losses = _columns(validation)
        axes.plot(steps, losses, "o-", color=_VALIDATION, markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
            fontweight="bold",
        )
    axes.set_ylabel(label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]
