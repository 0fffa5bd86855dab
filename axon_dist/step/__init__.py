"""One training step: what is given, how gradients are computed, and the next state.

A step is pure: `(state, batch) -> (state, metrics)`, jitted once, the state donated. Start reading
at `one_step` of `update.py`; its `mean_gradients` picks one of four ways to compute gradients:
`global_view.py`, `local_view.py` (per rank), `pipeline_view.py`, `elastic.py`. What a strategy
changes in the model itself is in `model_changes.py`; `StepSpec` (`spec.py`) is all that was given.
"""

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
