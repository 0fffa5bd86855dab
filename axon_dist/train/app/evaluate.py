"""Uses the model of a run: `evaluate` measures it, `generate_text` continues texts with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import step_of
from axon_dist.core.errors import ConfigError, reworded
from axon_dist.core.files import Place
from axon_dist.core.tree import map_with_path
from axon_dist.data import Loader, Tokenizer
from axon_dist.data.chat import ask, find_template
from axon_dist.mesh import World
from axon_dist.models import generate, next_token_loss, next_token_scores
from axon_dist.ops.precision import autocast, without_gathers
from axon_dist.step import PortableForm, TrainState, TrainStep
from axon_dist.train.loop.meters import LAG, MetricSums, delayed

from ...core.own_context import in_own_context
from ..config import RunConfig, unit_of, with_own_precision
from .run_model import chats_of, find_checkpoint, load_arrays, run_config, tokenizer_of
from .runs import build_loader, measured_on
from .steps import build_step, build_world, without_axes

SCORES: MappingProxyType[Callable, Callable] = MappingProxyType(
    {next_token_loss: next_token_scores}
)
"""Maps losses to functions for evaluation that also return metrics too expensive for training.

Both add the model's own term, if it returns one in eval mode; so do the perplexity and the bits per
byte that follow from the loss.
"""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The metrics of a checkpoint, and the data they were measured on.

    Args:
        checkpoint: the folder of the checkpoint.
        step: the number of steps taken; None if the folder's name does not contain it.
        data: a one-sentence description of the data.
        num_samples: the number of samples: images, or windows of a text.
        strategy: the name of the strategy.
        mesh: its mesh, as text.
        unit: the unit of the loss.
        metrics: `loss`, the metrics of the loss function, and for text `perplexity` and
            `bits_per_byte`.
    """

    checkpoint: Place
    step: int | None
    data: str
    num_samples: int
    strategy: str
    mesh: str
    unit: str
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        """Returns the values as plain data for JSON."""
        return {**dataclasses.asdict(self), "checkpoint": str(self.checkpoint)}


@in_own_context
def evaluate(
    run: str | Path,
    *,
    step: int | str | None = None,
    overrides: Sequence[str] = (),
    files: Sequence[str] = (),
    num_batches: int | None = None,
    one_device: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> Evaluation:
    """Measures the model of a run over its validation data, using each sample once.

    Every number equals that of plain JAX with the model in eval mode: `sum(totals) / sum(weights)`
    over all samples. It does not depend on the mesh or the batches, even if the last batch is
    smaller. The exceptions are those numbers of an own loss that `evaluate_sums` names, such as a
    maximum: they are means of their values for the batches.

    Args:
        run: the folder of a run.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        overrides: changes to the run's config, such as `"mesh=dp=4"`; any mesh and strategy works.
        files: paths or globs to measure on instead of the run's validation data.
        num_batches: use only this many batches, spread as in training; None for all.
        one_device: use one device, whatever the config says.
        tell: called with a message about each damaged checkpoint that is skipped, and one about
            the data before anything is compiled.
        trust: whether functions that the run's config names may be imported and called.

    Returns:
        The metrics.

    Raises:
        ConfigError: when there is no run in the folder, or the data or an override is wrong.
        CheckpointError: when the run has no such checkpoint, or it is damaged.
    """
    config = run_config(run, overrides, trust=trust)
    config, world = world_of(measured_on(config, files), one_device)
    tell = tell if world.process_index == 0 else lambda text: None
    checkpoint = find_checkpoint(run, config, step, tell)
    task = config.kind.task
    measure = SCORES.get(task.loss_fn, task.loss_fn)
    built = build_step(config, world, optax.identity(), loss_fn=measure, trains=False)
    loader = build_loader(config, world, built.strategy.batch_axes)
    tell(f"data: {loader.description}")
    _check_count(loader, num_batches)
    num_samples = loader.num_validated(num_batches)
    state = load_state(checkpoint, built)
    sums = MetricSums()
    batches = loader.validation_batches(num_batches)
    for batch_sums in delayed((built.evaluate_sums(state, batch) for batch in batches), LAG):
        sums.add(batch_sums)
    means = sums.means
    # A user's own loss need not be in nats per token.
    is_of_tokens = task.item == "tokens" and config.loss is None
    derived = of_text(means["loss"], loader) if is_of_tokens else {}
    return Evaluation(
        checkpoint=checkpoint,
        step=step_of(checkpoint.name),
        data=loader.description,
        num_samples=num_samples,
        strategy=built.strategy.name,
        mesh=str(world.spec),
        unit=unit_of(config),
        metrics={"loss": means["loss"], **means, **derived},
    )


def world_of(config: RunConfig, one_device: bool) -> tuple[RunConfig, World]:
    """Returns the config to use and the world: a run's devices, or one of them.

    Args:
        config: the config of a run.
        one_device: use one device, without any sharding.
    """
    if not one_device:
        return config, build_world(config)
    emulate = config.devices.emulate and 1
    alone = {"mesh": {"dp": 1}, "parallel": "ddp", "devices": {"emulate": emulate}}
    precision = without_gathers(with_own_precision(config).precision)
    plain = dataclasses.replace(config, precision=precision).to_dict()
    plain["train"]["accumulate"] = 1
    plain["axis_names"] = without_axes(config.axis_names)
    config = RunConfig.from_dict({**plain, **alone})
    if emulate:
        return config, build_world(config)
    return config, World.init("dp=1", [World.init().mesh.devices.flat[0]])


def load_state(checkpoint: Place, step: TrainStep) -> TrainState:
    """Loads the parameters of a checkpoint into the state of a step that only evaluates.

    Args:
        checkpoint: the folder of a checkpoint, saved on any mesh with any strategy.
        step: a step of the same model; its optimizer has no state, such as `optax.identity()`.

    Returns:
        The state to evaluate with.
    """
    targets: Any = step.weight_targets
    shardings = map_with_path(lambda path, _: targets[path].sharding, step.model_spec.weights)
    whole = NamedSharding(step.world.mesh, PartitionSpec())
    return PortableForm(step).with_weights(
        *load_arrays(checkpoint, step.model_spec, shardings, whole)
    )


def _check_count(loader: Loader, num_batches: int | None) -> None:
    """Raises if more batches are requested than there are."""
    count = getattr(loader.samples, "num_validation", None)
    if num_batches is None or count is None:
        return
    most = -(-count // loader.global_batch)
    if num_batches > most:
        raise ConfigError(
            f"got {num_batches} batches of {loader.global_batch} samples, but there are only "
            f"{count} samples for validation; use at most {most}, or leave the number out to use "
            "each sample once",
            code="too-many-batches",
        )


def of_text(loss: float, loader: Loader) -> dict[str, float]:
    """Computes text metrics from the mean loss per token in nats."""
    metrics = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
    text = getattr(loader.samples, "text", None)
    if text is not None and text.validation_bytes:
        tokens_per_byte = len(text.validation) / text.validation_bytes
        metrics["bits_per_byte"] = loss / math.log(2) * tokens_per_byte
    return metrics


@dataclasses.dataclass(frozen=True)
class Completion:
    """A prompt and its generated continuation.

    Args:
        prompt: the prompt.
        text: the generated text after the prompt.
        num_tokens: the number of generated tokens, including the end token.
        is_ended: whether the model ended the document.
    """

    prompt: str
    text: str
    num_tokens: int
    is_ended: bool


@in_own_context
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
    chat: bool = False,
    system: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> list[Completion]:
    """Continues texts with the model of a run; each prompt begins a document.

    With `chat`, each prompt is the message of a user, and the text is the answer to it.

    The parameters are split by the strategy of the run, or by its override; a pipeline splits them
    over all devices. The texts equal those of one device in the precision of the run; to change
    the precision, pass `overrides=["precision=float32"]`.

    Args:
        run: the folder of a run.
        prompts: texts to continue, none of them empty.
        num_tokens: the maximum number of tokens to add to each prompt.
        temperature: 0 takes the likeliest token; see `axon_dist.models.Sampling`.
        top_k: sample only from this many of the likeliest tokens; None for all.
        top_p: sample only from the fewest tokens that together have at least this probability; None
            for all.
        seed: the seed of the sampling.
        stops: end a text where the model ends the document, if its tokenizer has an end token.
        step: which checkpoint: the number of its step, `"best"`, or None for the newest.
        overrides: changes to the run's config, such as `"mesh=tp=4"` and `"parallel=tensor"`.
        one_device: use one device, whatever the config says.
        chat: write each prompt as a user's message with the run's chat template, and stop at the
            end of the answer.
        system: the system message of a chat; None for none.
        template_options: variables of the chat template, such as `{"enable_thinking": False}`; pass
            what the run's records have as `chat_template_kwargs`.
        tell: called with a message about each newer checkpoint that is damaged and skipped, and
            one about sources of a mixture that end texts differently.
        trust: whether functions that the run's config names may be imported and called.

    Returns:
        One completion for each prompt.

    Raises:
        ConfigError: when there is no run in the folder, its model is not a text model, a prompt
            is empty or too long, or a value is out of range.
        CheckpointError: when the run has no such checkpoint, or it is damaged.
    """
    config = run_config(run, overrides, trust=trust)
    tokenizer = tokenizer_of(run, config, chat, tell)
    end = tokenizer.end
    if chat:
        options = template_options or {}
        encoded, end = _chats(run, config, tokenizer, prompts, system, options)
    elif system is not None:
        raise ConfigError(
            "got a system message without chat; add --chat (chat=True), or leave it out",
            code="system-without-chat",
        )
    elif template_options is not None:
        raise ConfigError(
            f"got template options {dict(template_options)} without chat; add --chat (chat=True), "
            "or leave them out",
            code="template-options-without-chat",
        )
    else:
        encoded = [tokenizer.prompt(prompt) for prompt in prompts]
    config, world = world_of(config, one_device)
    model = _placed_model(find_checkpoint(run, config, step, tell), config, world)
    end = end if stops else None
    rows = generate(
        model,
        encoded,
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end=end,
        vocab_size=tokenizer.vocab_size,
    ).rows
    return [_completion(tokenizer, *row, end) for row in zip(prompts, encoded, rows, strict=True)]


def _chats(
    run: str | Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    system: str | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[np.ndarray], int | None]:
    """Encodes users' messages as in training; returns the ids, and the id that ends an answer."""
    data = chats_of(config.data)
    if getattr(data, "messages", None) is None:
        raise ConfigError(
            f"the run {str(run)!r} was not trained on chats: its data has no data.messages; leave "
            "out --chat (chat=True)",
            code="not-chats",
        )
    template = find_template(getattr(data, "template", None), getattr(data, "tokenizer", None))
    first = [] if system is None else [{"role": "system", "content": system}]
    encoded: list[np.ndarray] = []
    ending = ""
    for prompt in prompts:
        with reworded("the run's chat template got", "change the prompt", of=ValueError):
            messages = [*first, {"role": "user", "content": prompt}]
            text, answer, ending = ask(template, messages, options)
        encoded.append(prompt_of_chat(tokenizer, text, answer))
    return encoded, end_of_answer(tokenizer, ending)


def prompt_of_chat(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Encodes the text before an answer as the tokens that are before an answer in training.

    Args:
        tokenizer: the tokenizer of the run.
        prompt: the text before an answer.
        answer: the learned text of some answer.
    """
    whole = tokens_of_chat(tokenizer, prompt + answer)
    # A blank at the end of a prompt, as in "Assistant: ", is often one token with the first word
    # of an answer. Alone it would be a token that training never has there.
    for text in (prompt, prompt.rstrip()):
        ids = tokens_of_chat(tokenizer, text)
        if len(ids) and np.array_equal(whole[: len(ids)], ids):
            return ids
    return tokens_of_chat(tokenizer, prompt)


def end_of_answer(tokenizer: Tokenizer, ending: str) -> int | None:
    """Returns the id of the token that ends an answer; None if there is none.

    It is the special token that the ending begins with, such as `<|end|>` of
    `<|end|>\\n<|endoftext|>`.

    Args:
        tokenizer: the tokenizer of the run.
        ending: the text that ends every answer.
    """
    ending = ending.strip()
    for token in tokens_of_chat(tokenizer, ending).tolist() if ending else ():
        is_special = token in tokenizer.special
        decoded = tokenizer.special[token] if is_special else tokenizer.decode(np.array([token]))
        text = decoded.strip()
        # An unknown token is special too, but its text is not that of the ending.
        if text == ending or (is_special and text and ending.startswith(text)):
            return token
    # In chats, the post-processor of a tokenizer adds nothing, so only `added` can end an answer.
    return tokenizer.added[0] if tokenizer.added else None


def tokens_of_chat(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a text of a chat without the end of the document."""
    ids, _ = tokenizer.chat([(text, False)])
    return ids[: len(ids) - len(tokenizer.added)]


def _placed_model(checkpoint: Place, config: RunConfig, world: World) -> nnx.Module:
    """Loads the model of a checkpoint, with its parameters split by the strategy."""
    step = build_step(config, world, optax.identity(), trains=False)
    targets: Any = step.weight_targets

    # Drop the memory kind: parameters are in device memory even if the strategy offloads them.
    def on_device(path, _):
        return NamedSharding(world.mesh, targets[path].sharding.spec)

    shardings = map_with_path(on_device, step.model_spec.weights)
    replicated = NamedSharding(world.mesh, PartitionSpec())
    # Dequantize and cast the weights once instead of for every token.
    model_spec = dataclasses.replace(step.model_spec, int8={})
    precision = step.strategy.precision
    weights, buffers = load_arrays(checkpoint, model_spec, shardings, replicated)
    model = model_spec.merge(step.plan.changes.cast(weights), buffers)
    return autocast(model, precision) if precision is not None and precision.is_mixed else model


def _completion(
    tokenizer: Tokenizer, prompt: str, encoded: np.ndarray, tokens: list[int], end: int | None
) -> Completion:
    is_ended = end is not None and tokens[-1] == end
    new = np.array(tokens[:-1] if is_ended else tokens, np.int64)
    # Some tokenizers decode a token at the start differently, so decode prompt and text together.
    before, both = (tokenizer.decode(ids) for ids in (encoded, np.concatenate([encoded, new])))
    text = both[len(before) :] if both.startswith(before) else tokenizer.decode(new)
    return Completion(prompt, text, len(tokens), is_ended)
