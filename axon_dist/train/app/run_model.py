"""Loads or exports the trained model of a run from its checkpoints, without the optimizer."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from axon_dist.checkpoint.manager import ranked
from axon_dist.core.errors import AxonDistError, CheckpointError, ConfigError
from axon_dist.core.files import Place, as_path, as_place, kind_at
from axon_dist.core.plain_yaml import read_yaml
from axon_dist.core.reduction import mean_of_copies
from axon_dist.core.tree import combine, is_key, leaves_with_paths, map_with_path, partition
from axon_dist.core.typing import Array, Leaf, PyTree
from axon_dist.core.typing import Path as LeafPath
from axon_dist.data import Tokenizer, byte_tokenizer, load_tokenizer
from axon_dist.models.snapshot import REMOTE
from axon_dist.nn import merge_lora
from axon_dist.ops.int8 import NUMBERS, SCALE, Int8Form, narrowed, widened
from axon_dist.step import ModelSpec, split_model
from axon_dist.step.replicas import buffers_for_evaluation
from axon_dist.weights import (
    MAX_FILE,
    NATIVE_NAME,
    find_tensors,
    format_of,
    save_adapters,
    save_weights,
    token_ids,
)

from ...core.own_context import in_own_context
from ..config import MixtureData, RunConfig, load_untrusted, with_own_precision
from .directory import open_directory
from .steps import model_of, names_on

BEST = "best"
"""The value of `step` that selects the checkpoint with the best score by `train.best`."""


@in_own_context
def load_model(
    run: str | Path,
    step: int | str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    *,
    trust: bool = False,
) -> tuple[nnx.Module, RunConfig]:
    """Loads the model of a run as a plain module on one device, without the optimizer.

    The run may have used any mesh and strategy, including pipelines: a checkpoint stores the
    arrays in the form of the model. The module computes in its own dtypes, regardless of the run's
    `precision`. `autocast(model, MixedPrecision.of(config.precision))` of `axon_dist.precision`
    makes the module compute as the run did: the returned config has a `mixed_precision` of its
    strategies as its `precision`.

    Args:
        run: the folder of a run.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        tell: called with a message about each newer checkpoint that is damaged and skipped.
        trust: whether functions that the run's config names may be imported and called.

    Returns:
        The module and the config of the run. Parameters have the dtypes that were saved; if the run
        keeps a moving average of them, the module has the average. Int8 weights are widened to the
        dtype of the model. LoRA adapters stay separate; `merge_lora` merges them.

    Raises:
        ConfigError: when there is no run in the folder, or its config names functions and is not
            trusted.
        CheckpointError: when the run has no such checkpoint, or it is damaged.

    Example:
        >>> load_model("runs/none")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: there is no run in 'runs/none', because it has no ...
    """
    config = run_config(run, trust=trust)
    folder = find_checkpoint(run, config, step, tell)
    model_spec, _ = split_model(functools.partial(model_of, config))
    here = jnp.zeros(()).sharding
    shardings = jax.tree.map(lambda _: here, model_spec.weights)
    model = model_spec.merge(*load_arrays(folder, model_spec, shardings, here))
    return model, with_own_precision(config)


def run_config(run: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> RunConfig:
    """Reads the config of a run.

    With another mesh, the axis names of the model mean axes of that mesh, unless overrides name
    others.

    Args:
        run: the folder of a run.
        overrides: changes, such as `"mesh=dp=4"`.
        trust: whether functions that the config names may be imported and called.

    Raises:
        ConfigError: when there is no run in the folder, a value is invalid, or the config names
            functions and is not trusted.
    """
    directory = open_directory(run)
    if kind_at(directory.config) is None:
        raise ConfigError(
            f"there is no run in {str(run)!r}, because it has no {directory.config.name}; name a "
            "folder that axon train has made, such as runs/<name>-<time>",
            code="no-run",
        )
    if directory.config.is_symlink():
        raise ConfigError(
            f"{str(directory.config)!r} is a link, but links in the folder of a run are not "
            "followed; replace it with a copy of the file",
            code="is-a-link",
        )
    config = load_untrusted(directory.config, overrides, trust=trust)
    if not overrides or not config.axis_names:
        return config
    # Only these sections: the others may name functions that are not trusted.
    plain = read_yaml(directory.config)
    saved = RunConfig.from_dict({k: plain[k] for k in ("mesh", "axis_names") if k in plain})
    same = {n: axes for n, axes in config.axis_names.items() if saved.axis_names.get(n) == axes}
    names = {**config.axis_names, **names_on(same, saved.mesh, config.mesh)}
    return dataclasses.replace(config, axis_names=names)


def find_checkpoint(
    run: str | Path,
    config: RunConfig,
    step: int | str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Place:
    """Returns the folder of a checkpoint of a run.

    Args:
        run: the folder of the run.
        config: the config of the run; it may name another folder for checkpoints.
        step: the number of its step, `"best"`, or None for the newest.
        tell: called with a message about each newer checkpoint that is damaged and skipped.

    Raises:
        CheckpointError: when there is no such checkpoint; the message lists the existing ones.
    """
    default = as_place(run, "the run") / "checkpoints"
    elsewhere = config.checkpoint.dir
    folder = default if elsewhere is None else as_place(elsewhere, "checkpoint.dir")
    manager = CheckpointManager(folder, has_scored=config.train.best.has_scored)
    entries = manager.entries()
    if not entries:
        raise CheckpointError(
            f"there is no finished checkpoint in {str(folder)!r}; train until one is saved, or "
            "name another run"
        )
    if step is None:
        for damage in manager.passed_over():
            tell(f"{damage}: using the checkpoint before it")
        return folder / step_name(entries[-1].step)
    if step == BEST:
        best = config.train.best
        scored = ranked(entries)
        if not scored:
            raise CheckpointError(
                f"no checkpoint in {str(folder)!r} that the newest one continues has a score by "
                f"train.best ({best.metric}, {best.mode}), so none is the best; "
                "leave the step out for the newest, or name one",
                code="no-best",
            )
        return folder / step_name(scored[0].step)
    steps = [entry.step for entry in entries]
    if step not in steps:
        raise CheckpointError(
            f"got step {step!r}, but the checkpoints in {str(folder)!r} have the steps "
            f"{', '.join(map(str, steps))}; name one of these, or best, or none for the newest",
            code="no-such-step",
        )
    return folder / step_name(int(step))


def load_arrays(
    checkpoint: Place, model_spec: ModelSpec, shardings: PyTree, buffer_sharding: Sharding
) -> tuple[PyTree, PyTree]:
    """Reads only the parameters and the buffers of a model from a checkpoint.

    Per-rank statistics are averaged, as in evaluation. If the run keeps a moving average of its
    parameters, that average is read, since the run validated with it.

    Args:
        checkpoint: the folder of the checkpoint.
        model_spec: the shapes of the model. Floating-point arrays keep the dtypes that were saved;
            weights in `model_spec.int8` are returned in int8 form.
        shardings: the shardings of the trained and frozen parameters, in a tree like theirs.
        buffer_sharding: the sharding of every buffer.

    Returns:
        Parameters and buffers, in the form of the model.

    Raises:
        CheckpointError: when the checkpoint is damaged, or belongs to another model.
    """
    saved = read_manifest(checkpoint).leaves
    # With outer steps, every array except the outer parameters has a leading dim of replicas.
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

    # Use the checkpoint's split into trained and frozen parameters; this config may have another.
    forms = _saved_forms(saved, model_spec.weights)
    weights = jax.eval_shape(lambda weights: narrowed(weights, forms), model_spec.weights)
    frozen = {path for path, _ in leaves_with_paths(weights) if f"frozen/{path}" in saved}
    preferred = ("ema", "outer", "params")
    params = next(name for name in preferred if any(path.startswith(f"{name}/") for path in saved))

    def by_section(tree):
        return dict(zip((params, "frozen"), partition(tree, frozen), strict=True))

    buffer_shardings = jax.tree.map(lambda _: buffer_sharding, model_spec.buffers)
    wanted = {name: tree for name, tree in by_section(weights).items() if tree}
    wanted["buffers"] = model_spec.buffers

    # Scales are small, so they are replicated.
    def with_scale(path, sharding):
        return {NUMBERS: sharding, SCALE: buffer_sharding} if path in forms else sharding

    saved_shardings = by_section(map_with_path(with_scale, shardings))
    saved_shardings["buffers"] = buffer_shardings
    targets = map_with_path(target, wanted, {name: saved_shardings[name] for name in wanted})
    loaded = load_checkpoint(checkpoint, targets, parts=tuple(wanted))

    def to_model(path: LeafPath, leaf: Leaf, value: Array) -> Array:
        if path.startswith(("ema/", "outer/")):
            return value.astype(saved[path.replace(params, "params", 1)].dtype)
        if replicas and path.startswith("buffers/"):
            return buffers_for_evaluation(value)
        return mean_of_copies(value) if _is_per_rank(saved[path], leaf) else value

    loaded = map_with_path(to_model, wanted, loaded)
    weights = combine(loaded.get(params, {}), loaded.get("frozen", {}))
    weights = widened(weights, {p: form for p, form in forms.items() if p not in model_spec.int8})
    weights = narrowed(weights, {p: form for p, form in model_spec.int8.items() if p not in forms})
    return weights, loaded["buffers"]


def _saved_forms(saved: Mapping[LeafPath, LeafSpec], weights: PyTree) -> dict[LeafPath, Int8Form]:
    """Returns the weights that a checkpoint stores in int8."""
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
    max_file: int | None = None,
    adapters: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> int:
    """Writes the trained weights of a run, without its optimizer.

    LoRA adapters are merged into the weights, or written separately in peft's format.

    Args:
        run: the folder of a run.
        path: a file that ends in `.safetensors`, or a folder.
        format: `"native"`, where tensors have the paths of the model's arrays; or the layout of a
            hub, a key of `axon_dist.weights.FORMATS`. A hub layout also gets the tokenizer's files
            and a `config.json` with the token ids that the run's snapshot or tokenizer knows.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        dtype: the dtype of floats, such as `"bfloat16"`; None keeps the saved dtypes.
        max_file: the size in bytes above which weights are split into several files; None for
            `axon_dist.weights.MAX_FILE`. Adapters are in one file.
        adapters: write `adapter_config.json` and `adapter_model.safetensors` instead of the
            weights. They have the adapters, and in full the other parameters that `trainable` of
            the config selects. `format` is then that of the base model; "native" means the config's
            `weights.format`.
        tell: called with messages about newer checkpoints that are damaged and skipped, files that
            are not written, the dtype of the weights, and a base model that is not the one that
            the adapters were trained on.
        trust: whether functions that the run's config names may be imported and called.

    Returns:
        The number of tensors written.

    Raises:
        ConfigError: when there is no run in the folder, the format is unknown, or the folder has
            other files that would be mixed with these.
        CheckpointError: when the run has no such checkpoint, or it is damaged.
        UnsupportedError: when the model of the run is not of the family of the format.
    """
    if format != NATIVE_NAME:
        format_of(format)
    if adapters:
        if max_file is not None:
            raise ConfigError(
                f"got max_file={max_file} with adapters, which peft reads from one file; leave "
                "max_file out",
                code="adapters-in-files",
            )
        return _export_adapters(run, path, format, step, dtype, tell, trust)
    model, config = load_model(run, step, tell, trust=trust)
    if config.lora is not None:
        # Pass the dtype, so that bfloat16 kernels do not round the adapters of a wider export.
        model = merge_lora(model, dtype)
    is_hub = format != NATIVE_NAME
    keys = _token_ids(run, config, tell) if is_hub else {}
    most = MAX_FILE if max_file is None else max_file
    save_weights(model, path, format, dtype=dtype, max_file=most, keys=keys)
    file = written_to(path)
    if is_hub:
        on_main(lambda: _copy_tokenizer(config, file if file.is_dir() else file.parent, tell))
    tensors = find_tensors(file)
    if dtype is None:
        _tell_dtypes(tensors, tell)
    return len(tensors)


def _tell_dtypes(tensors: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    kinds = " and ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
    narrower = "; --dtype bfloat16 halves the size" if "float32" in kinds else ""
    tell(f"the tensors are {kinds}{narrower}")


def _export_adapters(
    run: str | Path,
    path: str | Path,
    format: str,
    step: int | str | None,
    dtype: str | None,
    tell: Callable[[str], None],
    trust: bool,
) -> int:
    """Writes the adapters of a run in peft's format; see `export_run`."""
    config = run_config(run, trust=trust)
    format = _format_of_base(run, config, format)
    model, config = load_model(run, step, tell, trust=trust)
    paths = [path for path, _ in leaves_with_paths(split_model(lambda: model)[0].weights)]
    plain = [path for path in paths if not path.rpartition("/")[0].endswith("lora")]
    # A pattern that matches only adapters adds no layers.
    modules = tuple(x for x in config.trainable if any(re.search(x, path) for path in plain))
    base = _base_of(config, tell)
    save_adapters(model, path, format, dtype=dtype, base=base, modules=modules)
    folder = as_path(path, "the adapters")
    on_main(lambda: _copy_tokenizer(config, folder, tell))
    tensors = find_tensors(folder)
    if dtype is None:
        _tell_dtypes(tensors, tell)
    return len(tensors)


def _format_of_base(run: str | Path, config: RunConfig, format: str) -> str:
    """Returns the format whose names the adapters of a run have.

    Raises:
        ConfigError: when the run has no adapters, or no format is known.
    """
    if config.lora is None:
        raise ConfigError(
            f"the run {str(run)!r} has no adapters, because its config has no lora; leave out "
            "--adapters (adapters=True) to write the weights",
            code="no-adapters",
        )
    if format != NATIVE_NAME:
        return format
    of_weights = NATIVE_NAME if config.weights is None else config.weights.format
    if of_weights == NATIVE_NAME:
        raise ConfigError(
            "adapters are written with peft's names of layers, but the run "
            f"{str(run)!r} has no weights.format that defines these names; give --format "
            "(format=...), such as hf-llama",
            code="no-format",
        )
    return of_weights


def _base_of(config: RunConfig, tell: Callable[[str], None]) -> str | None:
    """Returns the name of the base model for `adapter_config.json`; None if there is none."""
    if config.weights is None:
        tell(
            "the run started from random weights, which are in no file: the adapters are usable "
            "only with a base model that you save yourself"
        )
        return None
    if config.frozen_dtype == "int8":
        tell(
            "the adapters were trained on a base model in int8: with an unrounded base model, "
            "results differ slightly"
        )
    file, *others = config.weights.files
    if others:
        tell(
            f"base_model_name_or_path is null, because the weights come from {len(others) + 1} "
            "files or folders; give peft the base model yourself"
        )
        return None
    return file.removeprefix(REMOTE).partition("@")[0] if file.startswith(REMOTE) else file


def _token_ids(
    run: str | Path, config: RunConfig, tell: Callable[[str], None]
) -> Mapping[str, object]:
    """Returns special token ids from the run's initial snapshot, else its tokenizer's end token."""
    try:
        ids = {} if config.weights is None else token_ids(config.weights.files)
        return ids or {"eos_token_id": tokenizer_of(run, config, tell=tell).end}
    except AxonDistError as error:
        tell(f"config.json has no token ids: {error}")
        return {}


_TOKENIZER = "tokenizer.json"
_OTHER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json"),
)


def _copy_tokenizer(config: RunConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Copies the files of the run's tokenizer that exist."""
    named = getattr(config.data, "tokenizer", None)
    if named is None:
        return tell(f"no {_TOKENIZER} is written, because the run names no data.tokenizer")
    source = as_path(named, "data.tokenizer")
    is_sentencepiece = source.suffix == ".model"
    others = (source.with_name(name) for name in _OTHER_FILES)
    try:
        shutil.copyfile(source, folder / ("tokenizer.model" if is_sentencepiece else _TOKENIZER))
        for file in filter(Path.is_file, others):
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        tell(f"the tokenizer is not copied: {error}; copy it to {str(folder)!r} yourself")
    return None


def tokenizer_of(
    run: str | Path,
    config: RunConfig,
    chat: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Tokenizer:
    """Returns the tokenizer of a run, with the token that ends its documents.

    Args:
        run: the folder of the run.
        config: its config.
        chat: whether the texts are chats.
        tell: called with a message about sources of a mixture that end texts differently.

    Raises:
        ConfigError: when its model is not a text model, or its tokenizer is not known.
    """
    task = config.kind.task
    if task.item != "tokens":
        raise ConfigError(
            f"the model of the run {str(run)!r} is trained on {task.item}, but generation needs "
            "a text model; name another run",
            code="not-text",
        )
    data = config.data
    path = getattr(data, "tokenizer", None)
    if path is not None and isinstance(data, MixtureData):
        return _tokenizer_of_mixture(data, path, chat, tell)
    if path is not None:
        return _with_end(path, *_end_fields(data))
    if task.unit(data) != "nats/byte":
        raise ConfigError(
            f"the data of the run {str(run)!r} has tokens but no tokenizer, so they cannot be "
            "decoded to text; name it: data.tokenizer=FILE, or in a source of a mixture",
            code="no-tokenizer",
        )
    return byte_tokenizer()


def chats_of(data: Any) -> Any:
    """Returns the section that says how chats are read: of a mixture, its first source with chats.

    Args:
        data: the data section of a config. It is returned where no source has chats.
    """
    return next(iter(_chat_sources(data)), data)


def _chat_sources(data: Any) -> list[Any]:
    sources = data.sources if isinstance(data, MixtureData) else ()
    return [source for source in sources if getattr(source, "messages", None) is not None]


def _tokenizer_of_mixture(
    data: MixtureData, path: str, chat: bool, tell: Callable[[str], None]
) -> Tokenizer:
    """Loads the tokenizer of a mixture; texts end as those of the heaviest source that has an end.

    Chats are those of the first source that has some.
    """
    if chat:
        source = chats_of(data)
        if len({(one.template, one.end_token) for one in _chat_sources(data)}) > 1:
            tell(
                "the sources of the data have chats of several templates or end tokens; these are "
                f"used: data.sources[{data.sources.index(source)}], the first with chats"
            )
        return _with_end(path, *_end_fields(source))
    order = sorted(range(len(data.sources)), key=lambda number: -data.weights[number])
    # Large tokenizers load slowly, and most sources end texts in the same way.
    distinct = dict.fromkeys(_end_fields(data.sources[number]) for number in order)
    tokenizers = [_with_end(path, *fields) for fields in distinct]
    ending = [one for one in tokenizers if one.end is not None]
    ends = dict.fromkeys(one.end for one in ending)
    if len(ends) > 1:
        first, *others = (repr(ending[0].decode(np.array([end]))) for end in ends)
        tell(
            f"the sources of the data end documents with different tokens: {first}, which ends a "
            f"text here because its source has the largest weight, and {', '.join(others)}"
        )
    return (ending or tokenizers)[0]


def _end_fields(source: Any) -> tuple[str | None, int | None]:
    """Returns the end token and the id of the end of documents that a source names."""
    return getattr(source, "end_token", None), getattr(source, "document_end", None)


def _with_end(path: str, end_token: str | None, document_end: int | None) -> Tokenizer:
    """Loads a tokenizer whose documents end as a source says."""
    tokenizer = load_tokenizer(path, end_token)
    return tokenizer if document_end is None else dataclasses.replace(tokenizer, end=document_end)


def written_to(path: str | Path) -> Path:
    """Returns the path to pass to `load_weights` after `save_weights` wrote to a path."""
    file = as_path(path, "the weights")
    index = file.with_name(file.name + ".index.json")
    return index if index.exists() else file
