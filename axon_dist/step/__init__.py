"""One training step: its inputs, how it computes gradients, and the next state.

A step is a pure function `(state, batch) -> (state, metrics)`. It is jitted once and donates the
state. `StepSpec` (`spec.py`) has its arguments, and `StepPlan` (`plan.py`) the decisions that
follow from them. Start reading at `one_step` in `update.py`. Its `mean_gradients` picks one of four
ways to compute gradients: `global_view.py`, `local_view.py` (per rank), `pipeline_view.py` or
`elastic.py`. `model_changes.py` has the changes that a strategy makes to the model. `layout.py`
describes the shardings of a state and makes the first one. `step.py` has the jitted programs and
the methods that a training loop calls.
"""

from ..core.own_context import AxisNames as AxisNames
from .batch import BatchLayout as BatchLayout
from .batch import Placed as Placed
from .compiler import deterministic_options as deterministic_options
from .describe import idle_axes as idle_axes
from .layout import Claims as Claims
from .layout import weight_shapes as weight_shapes
from .model_spec import ModelLike as ModelLike
from .model_spec import ModelSpec as ModelSpec
from .model_spec import split_model as split_model
from .model_spec import trainable_filter as trainable_filter
from .options import Nonfinite as Nonfinite
from .options import StepOptions as StepOptions
from .plan import StepPlan as StepPlan
from .portable import PortableForm as PortableForm
from .rules import RULES as RULES
from .separation import Separation as Separation
from .sharing import sharing_steps as sharing_steps
from .spec import StepSpec as StepSpec
from .state import TrainState as TrainState
from .step import TrainStep as TrainStep
from .step import build_train_step as build_train_step
from .step import leaves_remat_open as leaves_remat_open
from .step import recomputing_least as recomputing_least
