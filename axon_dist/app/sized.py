"""A run of which only the number of parameters is known."""

from __future__ import annotations

import math

from axon_dist.core.errors import ConfigError

from ..config.schema import RunConfig


def config_of_size(
    num_params: float,
    *,
    global_batch: int,
    sequence_length: int = 2048,
    optimizer: str = "adam",
    precision: str | None = None,
) -> RunConfig:
    """A decoder of usual proportions that has about so many parameters, as a run.

    A block has about 12 width**2 parameters, and the width is about 128 times the number of
    blocks, with heads of 128, as GPT-3 and Llama have (Kaplan et al., arXiv:2001.08361, section
    2.1). The vocabulary is 32 000 tokens; models below 50 M read bytes and have heads of 32.

    Args:
        num_params: trainable scalars.
        global_batch: samples of a step.
        sequence_length: tokens of a sample.
        optimizer: a name that configs have.
        precision: a preset's name; None is float32.

    Raises:
        ConfigError: for a number that is not positive, or names that no config has.

    Example:
        >>> config = config_of_size(7e9, global_batch=64)
        >>> config.model.num_layers, config.model.width, config.model.num_heads
        (32, 4096, 32)
    """
    if not 1 <= num_params < math.inf:
        raise ConfigError(f"got {num_params} parameters; a model has at least one")
    head, vocabulary = (128, 32_000) if num_params >= 5e7 else (32, 256)
    depth = (num_params / (12 * 128**2)) ** (1 / 3)
    heads = _nearest(depth * 128 / head, 8 if depth >= 16 else 4)
    width = heads * head
    tied = num_params < 1e9
    tables = vocabulary * width * (1 if tied else 2)
    sizes = {"width": width, "num_heads": heads, "vocab_size": vocabulary, "tied_head": tied}
    layers = _nearest(max(num_params - tables, 0) / (12 * width**2), 4 if depth >= 16 else 1)
    model = {"num_layers": layers, "max_length": sequence_length, "scan_layers": True, **sizes}
    plain = {
        "name": "size",
        "model": {"kind": "transformer", **model},
        "data": {"kind": "text", "sequence_length": sequence_length},
        "optimizer": {"name": optimizer},
        "precision": precision,
        "train": {"global_batch": global_batch},
    }
    return RunConfig.from_dict(plain)


def _nearest(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple
