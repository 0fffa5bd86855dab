"""A run as data: typed, checked when read, written back.

Every other room takes values; only this one and those above know the config.
Start reading in `schema.py`; `read.py` turns YAML into types, and `app` builds what they describe.
"""

import importlib

from .data import DATA as DATA
from .data import ImageData as ImageData
from .data import JsonlData as JsonlData
from .data import MixtureData as MixtureData
from .data import OwnData as OwnData
from .data import ParquetData as ParquetData
from .data import SyntheticImageData as SyntheticImageData
from .data import TextData as TextData
from .data import TokenData as TokenData
from .describe import Key as Key
from .describe import Section as Section
from .describe import completion_words as completion_words
from .describe import describe as describe
from .describe import to_markdown as to_markdown
from .describe import to_text as to_text
from .models import MODELS as MODELS
from .models import ModelKind as ModelKind
from .models import OwnModel as OwnModel
from .optimizers import OPTIMIZERS as OPTIMIZERS
from .optimizers import OwnOptimizer as OwnOptimizer
from .own import Own as Own
from .parse import CONFIG as CONFIG
from .parse import load_config as load_config
from .parse import load_untrusted as load_untrusted
from .rates import SCHEDULES as SCHEDULES
from .schema import RunConfig as RunConfig
from .schema import build_strategy as build_strategy
from .sections import LOGGERS as LOGGERS
from .sections import CheckpointConfig as CheckpointConfig
from .sections import DevicesConfig as DevicesConfig
from .sections import TrainConfig as TrainConfig

VERBS = frozenset(
    [
        "AUTO",
        "DataCheck",
        "Examination",
        "Run",
        "RunDirectory",
        "RunResult",
        "Verification",
        "abstract_batch",
        "build_loader",
        "build_run",
        "build_step",
        "build_world",
        "check_data",
        "create_directory",
        "examine",
        "model_of",
        "step_for",
        "train",
        "verify",
    ]
)
"""Names of `axon_dist.app` that are found here too."""


def __getattr__(name: str) -> object:
    """What is built and run lives in `app`, above this room; asked for here, it is found."""
    if name in VERBS:
        return getattr(importlib.import_module("axon_dist.app"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
