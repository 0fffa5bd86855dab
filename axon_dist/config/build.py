"""From a `RunConfig` to a world, a step, batches and a trainer."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import optax
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.data import Text, TextLoader, load_text
from axon_dist.mesh import Timeouts, World, self_test
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.train import (
    LoopOptions,
    MetricWriter,
    Progress,
    Trainer,
    TrainState,
    TrainStep,
    build_train_step,
)

from .schema import RunConfig
from .strategies import build_strategy


def build_world(config: RunConfig) -> World:
    """Lays the config's mesh over its devices; must come before anything makes an array.

    Several processes meet here, and find out whether their devices can talk.

    Raises:
        LaunchError: when the processes of the run do not come together.
        MeshError: when the mesh does not fit the devices.
        BackendStartedError: when the devices can no longer be emulated.
    """
    if config.devices.emulate is not None:
        world = World.emulate(config.devices.emulate, config.mesh)
    else:
        world = World.init(config.mesh)
    if world.num_processes > 1:
        self_test(world, Timeouts.from_env(os.environ).launch)
    return world


def make_model(config: TransformerConfig, seed: int) -> Transformer:
    """Makes the model; a factory of it gives arrays that are born where they live."""
    return Transformer(config, rngs=nnx.Rngs(seed))


def build_step(
    config: RunConfig, world: World, optimizer: optax.GradientTransformation | None = None
) -> TrainStep:
    """Builds the step of a run; nothing is compiled yet.

    Args:
        config: the run.
        world: the devices.
        optimizer: in place of the config's own.

    Raises:
        ConfigError: when an option of the strategy is not one.
        DivisibilityError: when the batch does not divide over the mesh and the microbatches.
        MeshError: when the strategy needs an axis that the mesh lacks.
        StrategyConflictError: when strategies contradict each other.
    """
    factory = functools.partial(make_model, config.model, config.seed)
    step = build_train_step(
        factory,
        optimizer or config.optimizer.build(config.train.steps),
        next_token_loss,
        build_strategy(config.parallel, factory, world),
        world,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        precision=config.precision,
        remat=config.remat,
        scaler=config.loss_scale,
    )
    _check_batch(config, step)
    return step


def build_loader(
    config: RunConfig, world: World, batch_axes: Sequence[str] | None = None
) -> TextLoader:
    """Reads the text and makes the batches of this process.

    Args:
        config: the run.
        world: the devices.
        batch_axes: the mesh axes that split the batch; None stands for all.

    Raises:
        ConfigError: when a file is missing, or the text is too short or has too many tokens.
    """
    axes = world.mesh.axis_names if batch_axes is None else batch_axes
    process, num_processes = world.share_of_batch(axes)
    text = load_text(config.data)
    _check_vocabulary(config, text)
    return TextLoader(
        text,
        length=config.data.sequence_length,
        global_batch=config.train.global_batch,
        seed=config.seed,
        process=process,
        num_processes=num_processes,
        num_ahead=config.data.num_ahead,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, checked against each other, nothing compiled.

    Args:
        config: what it was made from.
        world: the devices.
        step: the step.
        loader: the batches of this process, and those of the validation.
    """

    config: RunConfig
    world: World
    step: TrainStep
    loader: TextLoader

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a global batch predicts."""
        return self.config.train.global_batch * self.config.data.sequence_length

    @property
    def unit(self) -> str:
        """What the loss is measured in."""
        return "nats/byte" if self.config.data.tokenizer is None else "nats/token"

    def trainer(
        self,
        progress: Progress,
        writers: Sequence[MetricWriter],
        save: Callable[[TrainState, int, float | None], None],
    ) -> Trainer:
        """Puts the loop around the step.

        Args:
            progress: shows the run.
            writers: take its metrics.
            save: takes its state now and then, as that of a `Trainer`.
        """
        train = self.config.train
        return Trainer(
            step=self.step,
            batches=self.loader,
            options=LoopOptions(
                num_steps=train.steps,
                log_every=train.log_every,
                eval_every=train.eval_every,
                save_every=self.config.checkpoint.every,
                tokens_per_step=self.tokens_per_step,
                peak_flops=train.peak_flops,
            ),
            validation=lambda: self.loader.validation_batches(train.eval_batches),
            writers=writers,
            progress=progress,
            save=save,
        )


def build_run(config: RunConfig) -> Run:
    """Builds everything a run needs; whatever can be checked is checked here.

    Raises:
        AxonDistError: of the kind that names what is wrong.

    Example:
        >>> config = RunConfig.from_dict({"devices": {"emulate": 8}, "data": {"max_bytes": 10**5}})
        >>> str(build_run(config).world.spec)
        'dp=8'
    """
    for logger in config.loggers:
        logger.check()
    world = build_world(config)
    step = build_step(config, world)
    return Run(config, world, step, build_loader(config, world, step.strategy.batch_axes))


def _check_batch(config: RunConfig, step: TrainStep) -> None:
    batch, divisor = config.train.global_batch, step.layout.divisor
    if batch % divisor:
        raise ConfigError(
            f"train.global_batch: got {batch} samples, which do not divide over mesh "
            f"{step.world.spec} and train.accumulate={config.train.accumulate} microbatches; "
            f"make it a multiple of {divisor}, such as {-(-batch // divisor) * divisor}"
        )


def _check_vocabulary(config: RunConfig, text: Text) -> None:
    if text.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: got {config.model.vocab_size}, but the data has tokens up to "
            f"{text.vocab_size - 1}; set it to at least {text.vocab_size}"
        )
