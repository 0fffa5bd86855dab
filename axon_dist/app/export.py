"""`export_run`: the weights of a run as safetensors, for programs that do not know this library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axon_dist.core.files import as_path
from axon_dist.nn import merge_lora
from axon_dist.weights import MAX_FILE, find_tensors, save_weights
from axon_dist.weights.formats import NATIVE_NAME, format_of

from .load import load_model


def export_run(
    run: str | Path,
    path: str | Path,
    format: str = NATIVE_NAME,
    *,
    step: int | str | None = None,
    dtype: str | None = None,
    max_file: int = MAX_FILE,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """Writes the weights that a run has learned, without its optimizer; adapters are added in.

    Args:
        run: the folder of a run.
        path: a file that ends in `.safetensors`, or a folder.
        format: `"native"`, where tensors have the paths of the model's arrays; or the layout of a
            hub, a key of `axon_dist.weights.FORMATS`, with a `config.json` beside it.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        dtype: of floats, such as `"bfloat16"`; None keeps those that were saved.
        max_file: bytes above which weights are cut into several files.
        tell: takes a sentence about each newer checkpoint that is damaged and was passed over.

    Returns:
        How many tensors were written.

    Raises:
        ConfigError: when there is no run in the folder, no such format, or other files are in the
            way.
        CheckpointError: when the run has no such checkpoint, or that is damaged.
        UnsupportedError: when the model of the run is not of the family of the format.
    """
    if format != NATIVE_NAME:
        format_of(format)
    model, config = load_model(run, step, tell)
    if config.lora is not None:
        model = merge_lora(model)
    save_weights(model, path, format, dtype=dtype, max_file=max_file)
    return len(find_tensors(written_to(path)))


def written_to(path: str | Path) -> Path:
    """What to name to `load_weights` after `save_weights` wrote to a path."""
    file = as_path(path, "the weights")
    index = file.with_name(file.name + ".index.json")
    return index if index.exists() else file
