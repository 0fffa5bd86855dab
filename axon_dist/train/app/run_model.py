"""The trained model of a run: its checkpoints, read without the optimizer, loaded or exported."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from axon_dist.checkpoint import (
    CheckpointManager,
    LeafSpec,
    load_checkpoint,
    on_main,
    read_manifest,
    step_name,
)
from axon_dist.core.errors import AxonDistError, CheckpointError, ConfigError
from axon_dist.core.files import Place, as_path, as_place, kind_at
from axon_dist.core.tree import combine, is_key, leaves_with_paths, map_with_path, partition
from axon_dist.core.typing import Array, Leaf, PyTree
from axon_dist.core.typing import Path as LeafPath
from axon_dist.data import Tokenizer, byte_tokenizer, load_tokenizer
from axon_dist.nn import merge_lora
from axon_dist.ops.int8 import NUMBERS, SCALE, Int8Form, narrowed, widened
from axon_dist.step import ModelSpec, split_model
from axon_dist.step.replicas import mean_rows
from axon_dist.weights import (
    MAX_FILE,
    NATIVE_NAME,
    find_tensors,
    format_of,
    save_weights,
    token_ids,
)

from ...core.own_context import in_own_context
from ..config import RunConfig, load_untrusted
from .directory import open_directory
from .steps import model_of

BEST = "best"
"""Which checkpoint: the one with the lowest validation loss."""


@in_own_context
def load_model(
    run: str | Path,
    step: int | str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    *,
    trust: bool = False,
) -> tuple[nnx.Module, RunConfig]:
    """Loads the model of a run as a plain module on one device, without the optimizer.

    It may have been trained on any mesh and strategy, pipelines among them: a checkpoint has the
    arrays in the form of the model. The module computes in its own dtypes, whatever `precision` the
    run has; `axon_dist.precision.autocast(model, config.precision)` makes it compute as the run
    did, where that is a `MixedPrecision`.

    Args:
        run: the folder of a run.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        tell: takes a sentence about each newer checkpoint that is damaged and was passed over.
        trust: whether functions that the run's config names may be imported and called.

    Returns:
        The module, with its parameters in the dtypes that were saved, or what the run has averaged
        of them, and what it kept in eight bits in the dtype of the model; its adapters, if it has
        some, beside its layers (`merge_lora` adds them in); and the config of the run.

    Raises:
        ConfigError: when there is no run in the folder, or its config names functions and is not
            trusted.
        CheckpointError: when it has no such checkpoint, or that is damaged.

    Example:
        >>> load_model("runs/none")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: there is no run in 'runs/none', for it has no ...
    """
    config = run_config(run, trust=trust)
    folder = find_checkpoint(run, config, step, tell)
    parts, _ = split_model(functools.partial(model_of, config))
    here = jnp.zeros(()).sharding
    shardings = jax.tree.map(lambda _: here, parts.weights)
    return parts.merge(*load_arrays(folder, parts, shardings, here)), config


def run_config(run: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> RunConfig:
    """The config that a run was made from.

    Args:
        run: the folder of a run.
        overrides: such as `"mesh=dp=4"`.
        trust: whether functions that the config names may be imported and called.

    Raises:
        ConfigError: when there is no run in the folder, a value cannot be, or the config names
            functions and is not trusted.
    """
    directory = open_directory(run)
    if kind_at(directory.config) is None:
        raise ConfigError(
            f"there is no run in {str(run)!r}, for it has no {directory.config.name}; name a "
            "folder that axon train has made, such as runs/<name>-<time>"
        )
    if directory.config.is_symlink():
        raise ConfigError(
            f"{str(directory.config)!r} is a link, and of the folder of a run none is followed; "
            "put a copy of the file in its place"
        )
    return load_untrusted(directory.config, overrides, trust=trust)


def find_checkpoint(
    run: str | Path,
    config: RunConfig,
    step: int | str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Place:
    """The folder of a checkpoint of a run.

    Args:
        run: the folder of the run.
        config: of the run; it says where the checkpoints are, if not there.
        step: the number of its step, `"best"`, or None for the newest.
        tell: takes a sentence about each newer checkpoint that is damaged and was passed over.

    Raises:
        CheckpointError: when there is no such checkpoint; it names those there are.
    """
    default = as_place(run, "the run") / "checkpoints"
    elsewhere = config.checkpoint.dir
    folder = default if elsewhere is None else as_place(elsewhere, "checkpoint.dir")
    manager = CheckpointManager(folder)
    entries = manager.entries()
    if not entries:
        raise CheckpointError(
            f"there is no finished checkpoint in {str(folder)!r}; train until one is saved, or "
            "name another run"
        )
    if step is None:
        for damage in manager.passed_over():
            tell(f"{damage}: taking the one before it")
        return folder / step_name(entries[-1].step)
    if step == BEST:
        scored = [(entry.score, entry.step) for entry in entries if entry.score is not None]
        if not scored:
            raise CheckpointError(
                f"no checkpoint in {str(folder)!r} has a validation loss to be the best by; leave "
                "the step out for the newest, or name one"
            )
        return folder / step_name(min(scored)[1])
    there = [entry.step for entry in entries]
    if step not in there:
        raise CheckpointError(
            f"got step {step!r}, and the checkpoints in {str(folder)!r} are of the steps "
            f"{', '.join(map(str, there))}; name one of these, best, or none for the newest"
        )
    return folder / step_name(int(step))


def load_arrays(
    checkpoint: Place, parts: ModelSpec, shardings: PyTree, buffer_sharding: Sharding
) -> tuple[PyTree, PyTree]:
    """Reads the parameters and the buffers of a model from a checkpoint, and nothing else.

    Statistics of which every rank has its own are averaged, as in evaluation. Of a run
    that keeps a moving average of its parameters, that is its model, as it was in its validations.

    Args:
        checkpoint: the folder of one.
        parts: the model's shapes; the dtypes of floating-point arrays are those that were saved,
            and what they keep in eight bits comes so.
        shardings: the shardings of the parameters, trained and frozen, a tree like them.
        buffer_sharding: that of every buffer.

    Returns:
        Parameters and buffers, in the form of the model.

    Raises:
        CheckpointError: when the checkpoint is damaged, or belongs to another model.
    """
    saved = read_manifest(checkpoint).leaves
    # Replicas with outer steps have a row each of every array but the outer parameters.
    inner = (path.replace("outer/", "params/", 1) for path in saved if path.startswith("outer/"))
    replicas = next((saved[path].shape[0] for path in inner if path in saved), 0)

    def target(path: LeafPath, leaf: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
        if path not in saved:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if replicas and path.startswith("buffers/"):
            return jax.ShapeDtypeStruct((replicas, *leaf.shape), leaf.dtype, sharding=sharding)
        shape = saved[path].shape if _is_per_rank(saved[path], leaf) else leaf.shape
        dtype = jnp.dtype(saved[path].dtype) if _is_float(leaf) else leaf.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    # The checkpoint says what was frozen, and how: this config may train other parameters.
    forms = _saved_forms(saved, parts.weights)
    weights = jax.eval_shape(lambda weights: narrowed(weights, forms), parts.weights)
    frozen = {path for path, _ in leaves_with_paths(weights) if f"frozen/{path}" in saved}
    preferred = ("ema", "outer", "params")
    params = next(name for name in preferred if any(path.startswith(f"{name}/") for path in saved))

    def divided(tree):
        return dict(zip((params, "frozen"), partition(tree, frozen), strict=True))

    everywhere = jax.tree.map(lambda _: buffer_sharding, parts.buffers)
    wanted = {name: tree for name, tree in divided(weights).items() if tree}
    wanted["buffers"] = parts.buffers

    # Scales are small, and replicated.
    def beside(path, place):
        return {NUMBERS: place, SCALE: buffer_sharding} if path in forms else place

    places = {**divided(map_with_path(beside, shardings)), "buffers": everywhere}
    targets = map_with_path(target, wanted, {name: places[name] for name in wanted})
    loaded = load_checkpoint(checkpoint, targets, parts=tuple(wanted))

    def to_model(path: LeafPath, leaf: Leaf, value: Array) -> Array:
        if path.startswith(("ema/", "outer/")):
            return value.astype(saved[path.replace(params, "params", 1)].dtype)
        if replicas and path.startswith("buffers/"):
            return mean_rows(value)
        return value.mean(0) if _is_per_rank(saved[path], leaf) else value

    loaded = map_with_path(to_model, wanted, loaded)
    weights = combine(loaded.get(params, {}), loaded.get("frozen", {}))
    weights = widened(weights, {p: form for p, form in forms.items() if p not in parts.int8})
    weights = narrowed(weights, {p: form for p, form in parts.int8.items() if p not in forms})
    return weights, loaded["buffers"]


def _saved_forms(saved: Mapping[LeafPath, LeafSpec], weights: PyTree) -> dict[LeafPath, Int8Form]:
    """The weights that a checkpoint has in eight bits."""
    forms: dict[LeafPath, Int8Form] = {}
    for path, leaf in leaves_with_paths(weights):
        scale = saved.get(f"frozen/{path}/{SCALE}")
        if scale is not None and f"frozen/{path}/{NUMBERS}" in saved:
            pairs = zip(scale.shape, leaf.shape, strict=True)
            dim = next((dim for dim, (one, size) in enumerate(pairs) if one != size), 0)
            forms[path] = Int8Form(tuple(leaf.shape), leaf.dtype, dim - len(leaf.shape))
    return forms


def _is_per_rank(saved: LeafSpec, leaf: Leaf) -> bool:
    return _is_float(leaf) and saved.shape[1:] == leaf.shape and len(saved.shape) > len(leaf.shape)


def _is_float(leaf: Leaf) -> bool:
    return not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


@in_own_context
def export_run(
    run: str | Path,
    path: str | Path,
    format: str = NATIVE_NAME,
    *,
    step: int | str | None = None,
    dtype: str | None = None,
    max_file: int = MAX_FILE,
    tell: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> int:
    """Writes the weights that a run has learned, without its optimizer; adapters are added in.

    Args:
        run: the folder of a run.
        path: a file that ends in `.safetensors`, or a folder.
        format: `"native"`, where tensors have the paths of the model's arrays; or the layout of a
            hub, a key of `axon_dist.weights.FORMATS`, with a `config.json` beside it, which has
            the ids of tokens that the run's snapshot or tokenizer knows, and the tokenizer's files.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        dtype: of floats, such as `"bfloat16"`; None keeps those that were saved.
        max_file: bytes above which weights are cut into several files.
        tell: takes a sentence about each newer checkpoint that is damaged and was passed over, one
            about what is not written beside the weights, and one about their dtype.
        trust: whether functions that the run's config names may be imported and called.

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
    model, config = load_model(run, step, tell, trust=trust)
    if config.lora is not None:
        # Kernels that were frozen in bfloat16 are not to round the adapters of a wider export.
        model = merge_lora(model, dtype)
    is_hub = format != NATIVE_NAME
    keys = _token_ids(run, config, tell) if is_hub else {}
    save_weights(model, path, format, dtype=dtype, max_file=max_file, keys=keys)
    file = written_to(path)
    if is_hub:
        on_main(lambda: _copy_tokenizer(config, file if file.is_dir() else file.parent, tell))
    tensors = find_tensors(file)
    if dtype is None:
        kinds = " and ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        narrower = "; --dtype bfloat16 (dtype='bfloat16') rounds them" if "32" in kinds else ""
        tell(f"the tensors are {kinds}{narrower}")
    return len(tensors)


def _token_ids(
    run: str | Path, config: RunConfig, tell: Callable[[str], None]
) -> Mapping[str, object]:
    """The ids of special tokens: those of the snapshot that the run began with, or its end."""
    try:
        ids = {} if config.weights is None else token_ids(config.weights.files)
        return ids or {"eos_token_id": tokenizer_of(run, config).end}
    except AxonDistError as error:
        tell(f"config.json has no ids of tokens: {error}")
        return {}


_TOKENIZER = "tokenizer.json"
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)


def _copy_tokenizer(config: RunConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Copies the files of the run's tokenizer, as far as they are there."""
    named = getattr(config.data, "tokenizer", None)
    if named is None:
        return tell(f"no {_TOKENIZER} is beside the weights, for the run names no data.tokenizer")
    source = as_path(named, "data.tokenizer")
    others = (source.with_name(name) for name in _BESIDE)
    try:
        shutil.copyfile(source, folder / _TOKENIZER)
        for file in filter(Path.is_file, others):
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        tell(f"the tokenizer is not copied: {error}; copy it to {str(folder)!r} yourself")
    return None


def tokenizer_of(run: str | Path, config: RunConfig) -> Tokenizer:
    """What turns the text of a run into tokens, and back.

    Raises:
        ConfigError: when its model is none of text, or nobody knows what its tokens mean.
    """
    task = config.kind.task
    if task.item != "tokens":
        raise ConfigError(
            f"the model of the run {str(run)!r} is trained on {task.item}, and generating needs "
            "one of text; name another run"
        )
    path = getattr(config.data, "tokenizer", None)
    if path is not None:
        tokenizer = load_tokenizer(path, getattr(config.data, "end_token", None))
        end = getattr(config.data, "document_end", None)
        return tokenizer if end is None else dataclasses.replace(tokenizer, end=end)
    if task.unit(config.data) != "nats/byte":
        raise ConfigError(
            f"the data of the run {str(run)!r} has tokens and no tokenizer, so that no text can be "
            "made of them; name it: data.tokenizer=FILE"
        )
    return byte_tokenizer()


def written_to(path: str | Path) -> Path:
    """What to name to `load_weights` after `save_weights` wrote to a path."""
    file = as_path(path, "the weights")
    index = file.with_name(file.name + ".index.json")
    return index if index.exists() else file
