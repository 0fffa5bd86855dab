"""The config of a run: typed, checked when read, and written back.

The rest of the library takes plain values; only the packages in `train` use configs. Start reading
in `schema.py`; `read.py` turns YAML into types, and `app` builds a run from them.
"""

from .describe import Key as Key
from .describe import Section as Section
from .describe import completion_words as completion_words
from .describe import describe as describe
from .describe import to_markdown as to_markdown
from .describe import to_text as to_text
from .models import MODELS as MODELS
from .models import ModelKind as ModelKind
from .models import OwnModel as OwnModel
from .models import make_model as make_model
from .optimizers import OPTIMIZERS as OPTIMIZERS
from .optimizers import Decaying as Decaying
from .optimizers import Optimizer as Optimizer
from .optimizers import OwnOptimizer as OwnOptimizer
from .parse import CONFIG as CONFIG
from .parse import load_config as load_config
from .parse import load_untrusted as load_untrusted
from .rates import RATES as RATES
from .schema import RunConfig as RunConfig
from .schema import abstract_batch as abstract_batch
from .schema import build_strategy as build_strategy
from .schema import unit_of as unit_of
from .schema import with_own_precision as with_own_precision
from .schema import without_option as without_option
from .sections import DATA as DATA
from .sections import LOGGERS as LOGGERS
from .sections import CheckpointConfig as CheckpointConfig
from .sections import DevicesConfig as DevicesConfig
from .sections import ImageData as ImageData
from .sections import JsonlData as JsonlData
from .sections import Logger as Logger
from .sections import MixtureData as MixtureData
from .sections import Mlflow as Mlflow
from .sections import OwnData as OwnData
from .sections import ParquetData as ParquetData
from .sections import Prometheus as Prometheus
from .sections import SyntheticImageData as SyntheticImageData
from .sections import TensorBoard as TensorBoard
from .sections import TextData as TextData
from .sections import TokenData as TokenData
from .sections import Trackio as Trackio
from .sections import TrainConfig as TrainConfig
from .sections import Wandb as Wandb
from .user_code import UserCode as UserCode
