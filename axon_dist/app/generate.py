"""`generate_text`: the model of a run goes on with texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import map_with_path
from axon_dist.data import Tokenizer, byte_tokenizer, load_tokenizer
from axon_dist.mesh import World
from axon_dist.models import generate
from axon_dist.ops.precision import autocast

from ..config.build import build_step
from ..config.schema import RunConfig
from .load import find_checkpoint, load_arrays, run_config, world_of


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text that was gone on with.

    Args:
        prompt: how it began.
        text: what follows.
        num_tokens: how many tokens that is, the end of the document included.
        is_ended: whether the model has ended the document.
    """

    prompt: str
    text: str
    num_tokens: int
    is_ended: bool


def generate_text(
    run: str | Path,
    prompts: Sequence[str],
    num_tokens: int = 100,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stops: bool = True,
    step: int | str | None = None,
    overrides: Sequence[str] = (),
    one_device: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Completion]:
    """Goes on with texts as the model of a run would, beginning documents with them.

    The parameters are split as the strategy of the run, or the one named in its place, splits them;
    those of a pipeline over all devices. The texts are those of one device, in the precision of the
    run: `overrides=["precision=float32"]` for another.

    Args:
        run: the folder of a run.
        prompts: texts to go on with, none of them empty.
        num_tokens: how many tokens to add to each at most.
        temperature: 0 takes the likeliest token; see `axon_dist.models.Sampling`.
        top_k: draw among this many of the likeliest tokens; None for all.
        top_p: draw among the fewest that together have at least this probability; None for all.
        seed: of the draws.
        stops: end a text where the model ends the document, if its tokenizer has an end.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        overrides: changes of the run's config, such as `"mesh=tp=4"` and `"parallel=tensor"`.
        one_device: on one device, whatever the config says.
        tell: takes a sentence about each newer checkpoint that is damaged and was passed over.

    Returns:
        One completion for each prompt.

    Raises:
        ConfigError: when there is no run in the folder, its model is none of text, a prompt is
            empty or too long, or a value is out of range.
        CheckpointError: when the run has no such checkpoint, or that is damaged.
    """
    config = run_config(run, overrides)
    tokenizer = tokenizer_of(run, config)
    encoded = [tokenizer.prompt(prompt) for prompt in prompts]
    config, world = world_of(config, one_device)
    model = _placed_model(find_checkpoint(run, config, step, tell), config, world)
    end = tokenizer.end if stops else None
    found = generate(
        model,
        encoded,
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end=end,
    )
    return [
        _completion(tokenizer, *row, end) for row in zip(prompts, encoded, found.rows, strict=True)
    ]


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


def _placed_model(checkpoint: Path, config: RunConfig, world: World) -> nnx.Module:
    """The model of a checkpoint, its parameters where the strategy lays them."""
    step = build_step(config, world, optax.identity(), meeting=lambda slow: None)
    targets: Any = step.weight_targets
    # In device memory, where a strategy that offloads them would not have them.
    place = lambda path, _: NamedSharding(world.mesh, targets[path].sharding.spec)
    where = map_with_path(place, step.parts.weights)
    whole = NamedSharding(world.mesh, PartitionSpec())
    # Widened and cast once rather than for every token.
    parts, precision = dataclasses.replace(step.parts, int8={}), step.strategy.precision
    weights, buffers = load_arrays(checkpoint, parts, where, whole)
    model = parts.merge(step.spec.view.cast(weights), buffers)
    return autocast(model, precision) if precision is not None and precision.is_mixed else model


def _completion(
    tokenizer: Tokenizer, prompt: str, encoded: np.ndarray, tokens: list[int], end: int | None
) -> Completion:
    is_ended = end is not None and tokens[-1] == end
    new = np.array(tokens[:-1] if is_ended else tokens, np.int64)
    # Some tokenizers write a token otherwise where it is the first.
    before, both = (tokenizer.decode(ids) for ids in (encoded, np.concatenate([encoded, new])))
    text = both[len(before) :] if both.startswith(before) else tokenizer.decode(new)
    return Completion(prompt, text, len(tokens), is_ended)
