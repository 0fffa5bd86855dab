"""The training loop around a step: the trainer, its records, signals and progress display.

Imports `step`, `mesh` and `core`. Start reading in `trainer.py`; its options are in `limits.py`,
the metric writers in `metrics.py`.
"""

from axon_dist.core.errors import require as require
from axon_dist.core.tree import bytes_per_device as bytes_per_device
from axon_dist.core.words import byte_size as byte_size
from axon_dist.core.words import clock_time as clock_time
from axon_dist.core.words import duration as duration
from axon_dist.core.words import plural as plural
from axon_dist.core.words import si as si

from .limits import LoopOptions as LoopOptions
from .limits import StopConsensus as StopConsensus
from .limits import StopRequest as StopRequest
from .limits import stop_on_signals as stop_on_signals
from .meters import StepTime as StepTime
from .meters import model_flops_utilization as model_flops_utilization
from .meters import profile as profile
from .meters import time_step as time_step
from .metrics import JsonlWriter as JsonlWriter
from .metrics import LastingWriter as LastingWriter
from .metrics import MetricWriter as MetricWriter
from .metrics import MlflowWriter as MlflowWriter
from .metrics import PrometheusWriter as PrometheusWriter
from .metrics import TensorBoardWriter as TensorBoardWriter
from .metrics import TrackioWriter as TrackioWriter
from .metrics import WandbWriter as WandbWriter
from .metrics import has_module as has_module
from .metrics import plot_losses as plot_losses
from .progress import LiveProgress as LiveProgress
from .progress import PlainProgress as PlainProgress
from .progress import Progress as Progress
from .progress import SilentProgress as SilentProgress
from .progress import Status as Status
from .progress import make_progress as make_progress
from .record import FINISHED as FINISHED
from .record import TrainResult as TrainResult
from .record import reason_to_end as reason_to_end
from .trainer import Trainer as Trainer
