"""What a model starts from: adapters put beside its layers, and weights of files."""

from __future__ import annotations

import dataclasses
import zlib

import jax
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.nn import lora
from axon_dist.step import TrainState, TrainStep
from axon_dist.weights import load_weights
from axon_dist.weights.formats import NATIVE_NAME, format_of
from axon_dist.weights.load import check_weights

from .kinds import Count

ADAPTER = r"(?:.*/)?lora/lora_[ab]"
"""The paths of what `lora` adds to a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters, which are then what is trained; see `axon_dist.lora`.

    Their scale, which papers call alpha / rank, is one of the learning rate.

    Args:
        rank: columns of the one matrix of an adapter, and rows of the other.
        paths: regular expressions, searched for in the paths of linear layers; empty takes all.
    """

    rank: Count = 8
    paths: tuple[str, ...] = ()

    def beside(self, model: nnx.Module, seed: int) -> nnx.Module:
        """The model with adapters.

        Raises:
            ConfigError: when a path finds no layer.
        """
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"lora"))
        return lora(model, self.rank, self.paths or "", rngs=nnx.Rngs(key))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Files that a run takes its first weights from; see `axon_dist.load_weights`.

    Args:
        files: safetensors files, or one folder with them, such as the snapshot of a hub's
            repository.
        format: how tensors are named, `native` or the layout of a hub, such as `hf-llama`.
        cast: convert between dtypes of floats, to nearest.
        keep: regular expressions of paths that keep the first values of the model where the files
            have none; adapters do anyway.
    """

    files: tuple[str, ...]
    format: str = NATIVE_NAME
    cast: bool = False
    keep: tuple[str, ...] = ()

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: when no file is named, or the format is none.
        """
        if not self.files:
            raise ConfigError("weights.files names no file: name safetensors files, or a folder")
        if self.format != NATIVE_NAME:
            format_of(self.format)

    def check(self, step: TrainStep) -> None:
        """Compares the names and shapes of the files with a step, and reads no array.

        Raises:
            CheckpointError: as `load` does.
        """
        check_weights(step, *self._files, cast=self.cast, keep=(*self.keep, ADAPTER))

    @property
    def _files(self) -> tuple[str | list[str], str]:
        return self.files[0] if len(self.files) == 1 else list(self.files), self.format

    def load(self, step: TrainStep) -> TrainState:
        """The first state of a step.

        Raises:
            CheckpointError: naming what is missing in the files, left over, or of another shape or
                dtype.
        """
        return load_weights(step, *self._files, cast=self.cast, keep=(*self.keep, ADAPTER))
