"""The loss curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from .extras import require

Curve: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of step and value."""

_TRAIN, _VALIDATION, _INK, _GRID = "#9ab6d6", "#c1440e", "#333333", "#e6e6e6"


def plot_losses(path: str | Path, train: Curve, validation: Curve, unit: str, title: str) -> None:
    """Draws training and validation loss over the steps into a PNG file.

    Args:
        path: of the PNG file, replaced if it is there.
        train: training loss by step.
        validation: validation loss by step, few points.
        unit: of the loss, such as `nats/byte`.
        title: stands above the axes.

    Raises:
        ConfigError: when matplotlib is not installed.
    """
    # Figure instead of pyplot: no window, no global state, and the user's backend is left alone.
    figure = require("matplotlib.figure", "plots", "the loss plot").Figure(
        figsize=(8, 4.5), dpi=150, layout="constrained"
    )
    axes = figure.add_subplot()
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
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(f"loss ({unit})", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False)
    figure.savefig(path)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]
