"""One training step: its inputs, how it computes gradients, and the next state.

A step is a pure function `(state, batch) -> (state, metrics)`. It is jitted once and donates the
state. Start reading at `one_step` in `update.py`. Its `mean_gradients` picks one of four ways to
compute gradients: `global_view.py`, `local_view.py` (per rank), `pipeline_view.py` or
`elastic.py`. `model_changes.py` has what a strategy changes in the model itself. `StepSpec`
(`spec.py`) holds everything the step was built from.
"""

from ..core.own_context import AxisNames as AxisNames
from .batch import BatchLayout as BatchLayout
from .batch import Placed as Placed
from .build import build_train_step as build_train_step
from .build import leaves_remat_open as leaves_remat_open
from .options import StepOptions as StepOptions
from .parts import ModelLike as ModelLike
from .parts import ModelSpec as ModelSpec
from .parts import split_model as split_model
from .parts import trainable_filter as trainable_filter
from .rules import RULES as RULES
from .spec import StepSpec as StepSpec
from .spec import deterministic_options as deterministic_options
from .state import Nonfinite as Nonfinite
from .state import TrainState as TrainState
from .state_form import Claims as Claims
from .state_form import weight_shapes as weight_shapes
from .step import PortableForm as PortableForm
from .step import TrainStep as TrainStep
