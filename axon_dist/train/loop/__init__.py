"""The training loop around a step: the trainer, its records, signals and progress display.

Imports `step`, `mesh` and `core`. Start reading in `trainer.py`; its options are in `limits.py`,
the metric writers in `writers.py`.
"""

from .limits import FINISHED as FINISHED
from .limits import LoopOptions as LoopOptions
from .limits import StopConsensus as StopConsensus
from .limits import StopRequest as StopRequest
from .limits import stop_on_signals as stop_on_signals
from .meters import StepTime as StepTime
from .meters import model_flops_utilization as model_flops_utilization
from .meters import profile as profile
from .meters import time_step as time_step
from .progress import LiveProgress as LiveProgress
from .progress import PlainProgress as PlainProgress
from .progress import Progress as Progress
from .progress import SilentProgress as SilentProgress
from .progress import Status as Status
from .progress import make_progress as make_progress
from .record import TrainResult as TrainResult
from .record import reason_to_end as reason_to_end
from .trainer import Trainer as Trainer
from .writers import JsonlWriter as JsonlWriter
from .writers import MetricWriter as MetricWriter
from .writers import MlflowWriter as MlflowWriter
from .writers import PrometheusWriter as PrometheusWriter
from .writers import TensorBoardWriter as TensorBoardWriter
from .writers import TolerantWriter as TolerantWriter
from .writers import TrackioWriter as TrackioWriter
from .writers import WandbWriter as WandbWriter
from .writers import has_module as has_module
from .writers import plot_losses as plot_losses
