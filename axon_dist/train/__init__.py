"""Putting a run together: the one step builder, its state, and the loop around it.

A step is pure: `(state, batch) -> (state, metrics)`, jitted once, the state donated. Imports every
room below but `config`. Start reading in `step.py`, then `objective.py`.
"""

from .batch import BatchLayout as BatchLayout
from .batch import Placed as Placed
from .claims import Claims as Claims
from .determinism import deterministic_options as deterministic_options
from .extras import has_module as has_module
from .extras import require as require
from .live import LiveProgress as LiveProgress
from .live import make_progress as make_progress
from .loop import FINISHED as FINISHED
from .loop import Trainer as Trainer
from .loop import TrainResult as TrainResult
from .meters import StepTime as StepTime
from .meters import bytes_per_device as bytes_per_device
from .meters import model_flops_utilization as model_flops_utilization
from .meters import profile as profile
from .meters import time_step as time_step
from .metrics import JsonlWriter as JsonlWriter
from .metrics import MetricWriter as MetricWriter
from .metrics import TensorBoardWriter as TensorBoardWriter
from .metrics import WandbWriter as WandbWriter
from .nonfinite import Nonfinite as Nonfinite
from .options import StepOptions as StepOptions
from .plots import plot_losses as plot_losses
from .portable import PortableForm as PortableForm
from .progress import PlainProgress as PlainProgress
from .progress import Progress as Progress
from .progress import SilentProgress as SilentProgress
from .progress import Status as Status
from .progress import byte_size as byte_size
from .progress import clock_time as clock_time
from .progress import duration as duration
from .progress import si as si
from .rhythm import LoopOptions as LoopOptions
from .state import TrainState as TrainState
from .step import TrainStep as TrainStep
from .step import build_train_step as build_train_step
from .stop import StopConsensus as StopConsensus
from .stop import StopRequest as StopRequest
from .stop import stop_on_signals as stop_on_signals
