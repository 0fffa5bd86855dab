"""Loads a checkpoint into a state that a changed config has given more or fewer parts.

Averages that are watched for spikes, the moving average, the loss scale and the feedback of
compression can begin at any step. The rest of a state must be as it was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axon_dist.checkpoint.layout import Manifest, renamed, saved_names
from axon_dist.checkpoint.save import Refit, load_refitted
from axon_dist.core.files import Place
from axon_dist.core.tree import leaves_with_paths, map_with_path
from axon_dist.core.typing import Array, Path, PyTree
from axon_dist.ops.precision import GradScaler
from axon_dist.sharding.padding import padded, unpad
from axon_dist.step import TrainState
from axon_dist.step.state import wide_copy

_OPT_STATE = "opt_state/"
_METRICS = "opt_state/metrics/"
_WATCHED = ("opt_state/steps", "opt_state/averages/", _METRICS)
"""What a watched optimizer adds to the state, besides `inner`."""

_PARTS = {
    "train.spikes": ("the averages of losses and norms", _WATCHED, "at 0"),
    "train.ema": ("the moving average", ("ema/",), "with the parameters of this step"),
    "precision or loss_scale": ("the loss scale", ("scaler/",), "at its first value"),
    "parallel": ("the feedback of compression", ("outer_state/missing/",), "at 0"),
}
"""By config key: what may begin at any step, the paths of its leaves, and how it begins."""


def _inner(paths: Collection[Path]) -> str:
    """Returns the prefix of the state of the optimizer that the config names."""
    if not any(path.startswith(_METRICS) for path in paths):
        return _OPT_STATE
    # In 0.2 and before, a clip came before it in the chain that is watched.
    chained = (f"{_OPT_STATE}inner/{number}/" for number in (1, 0))
    starts = (p for p in chained if any(x.startswith(p) for x in paths))
    return next(starts, f"{_OPT_STATE}inner/")


def refit_of(saved: Collection[Path], wanted: Collection[Path]) -> tuple[Refit, list[str]]:
    """Finds out which leaves of a checkpoint moved, and which parts begin or end.

    Args:
        saved: the paths of the leaves in the checkpoint.
        wanted: the paths of the leaves of the state to restore.

    Returns:
        How the two differ, and a sentence for each part that begins or ends.

    Example:
        >>> refit_of(["params/w", "ema/w"], ["params/w"])[1]
        ['train.ema: the moving average in the checkpoint is not read']
    """
    names = saved_names(saved, wanted)
    before, now = _inner(saved), _inner(wanted)
    if before != now:
        for path in wanted:
            moved = before + path.removeprefix(now)
            if path.startswith(now) and not path.startswith(_WATCHED) and moved in saved:
                names[path] = moved
    absent: set[Path] = set()
    dropped: set[Path] = set()
    lines = []
    for key, (what, starts, how) in _PARTS.items():
        own = [path for path in wanted if path.startswith(starts)]
        theirs = [path for path in saved if renamed(path).startswith(starts)]
        if starts == _WATCHED:
            own = own if now != _OPT_STATE else []
            theirs = theirs if before != _OPT_STATE else []
            begun, ended = _watched_parts(names, own, theirs)
            begins, ends = (any("/averages/" in path for path in some) for some in (begun, ended))
        else:
            # What neither begins nor ends, but differs, is of another model.
            begun, ended = set(own if not theirs else ()), set(theirs if not own else ())
            begins, ends = bool(begun), bool(ended)
        absent |= begun
        dropped |= ended
        is_plural = starts == _WATCHED
        if begins:
            lines.append(f"{key}: {what} begin{'' if is_plural else 's'} {how}")
        elif ends:
            are = "are" if is_plural else "is"
            lines.append(f"{key}: {what} in the checkpoint {are} not read")
    names = {path: name for path, name in names.items() if path not in absent}
    return Refit(names, frozenset(absent), frozenset(dropped)), lines


def _watched_parts(
    names: Mapping[Path, Path], own: Collection[Path], theirs: Collection[Path]
) -> tuple[set[Path], set[Path]]:
    """Returns the leaves of a watched optimizer that begin, and those that end."""
    has = set(theirs)
    kept = {path for path in own if names[path] in has}
    # The metrics are those of the last step only, so a missing one begins alone. If any average or
    # the step count is missing, all begin anew.
    if any(path not in kept and not path.startswith(_METRICS) for path in own):
        kept = set()
    return set(own) - kept, has - {names[path] for path in kept}


def load_state(
    path: Place,
    target: TrainState,
    scaler: GradScaler | None,
    changed: Callable[[Manifest], list[str]],
    tell: Callable[[str], None],
) -> TrainState:
    """Restores the state of a run whose config may have changed.

    Args:
        path: the checkpoint.
        target: the canonical form of the state, of shapes with shardings.
        scaler: the loss scale of the step, if it has one.
        changed: returns a line for each key of the config that has changed since it was saved.
        tell: called with a sentence for each part of the state that begins or ends here.

    Raises:
        CheckpointError: when another part of the state differs; it names the changed keys.
    """
    told: list[str] = []

    def find(manifest: Manifest, wanted: Collection[Path]) -> Refit:
        refit, lines = refit_of(manifest.leaves, wanted)
        told[:] = lines
        # The data shapes no state.
        if keys := [line for line in changed(manifest) if not line.startswith("data.")]:
            text = f"the config has changed since it was saved: {'; '.join(keys)}. Set back the "
            text += "keys that shape the state, or begin another run"
            refit = dataclasses.replace(refit, advice=text)
        return refit

    state = load_refitted(path, target, find)
    for line in told:
        tell(line)
    return _filled(state, scaler)


def _filled(state: TrainState, scaler: GradScaler | None) -> TrainState:
    """Puts first values where the checkpoint had none, and the state has shapes."""
    missing = {x: leaf for x, leaf in leaves_with_paths(state) if not isinstance(leaf, jax.Array)}
    if not missing:
        return state
    shardings = {path: leaf.sharding for path, leaf in missing.items()}

    def first(params: PyTree) -> Mapping[Path, Array]:
        averages = leaves_with_paths(wide_copy(params))
        values: dict[Path, Any] = {f"ema/{path}": x for path, x in averages}
        if scaler is not None:
            values |= {f"scaler/{path}": x for path, x in leaves_with_paths(scaler.init())}
        return {path: _like(values.get(path), leaf) for path, leaf in missing.items()}

    found = jax.jit(first, out_shardings=shardings)(state.params)
    return map_with_path(lambda path, leaf: found.get(path, leaf), state)


def _like(value: Any, leaf: jax.ShapeDtypeStruct) -> Array:
    """Returns a first value in the shape of a leaf: padded like it, or once for each replica."""
    if value is None:
        return jnp.zeros(leaf.shape, leaf.dtype)
    if value.ndim == len(leaf.shape):
        both = tuple(map(min, value.shape, leaf.shape))
        value = padded(unpad(value, both), leaf.shape)
    return jnp.broadcast_to(value, leaf.shape).astype(leaf.dtype)
