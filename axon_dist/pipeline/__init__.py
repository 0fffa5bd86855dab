"""Pipeline parallelism: cuts a model into stages, and runs any schedule with one executor.

In the order of a step: `layout.py` assigns blocks to stages and stages to ranks. `storage.py`
defines the stored form of their parameters. `loss_trace.py` traces the loss, and `uniform.py` or
`switch.py` cuts the trace into stages. `stage.py` runs and differentiates one stage. `tables.py`
turns a schedule into arrays, by which `executor.py` runs the stages. `optimizer.py` updates the
stored parameters, with `owners.py`, `row_update.py` and `tree_storage.py`. `vocabulary.py` splits
embeddings and heads over the ranks. This package does not depend on strategies;
`step/pipeline_view.py` connects them.
"""

from .executor import Executor as Executor
from .layout import ByStages as ByStages
from .layout import OfBlocks as OfBlocks
from .layout import Stacks as Stacks
from .layout import Stages as Stages
from .layout import buffer_paths as buffer_paths
from .layout import buffers_together as buffers_together
from .layout import flatten as flatten
from .layout import has_split as has_split
from .layout import nest as nest
from .loss_trace import LossTrace as LossTrace
from .loss_trace import buffers_over_time as buffers_over_time
from .loss_trace import check_order as check_order
from .loss_trace import mean_microbatch_weight as mean_microbatch_weight
from .loss_trace import trace_loss as trace_loss
from .loss_trace import with_merged_batch_dims as with_merged_batch_dims
from .optimizer import UnstackedOptimizer as UnstackedOptimizer
from .stage import MicrobatchData as MicrobatchData
from .stage import StageLoss as StageLoss
from .stage import StageProgram as StageProgram
from .stage import Wire as Wire
from .storage import StageStorage as StageStorage
from .switch import PASS_A_BATCH as PASS_A_BATCH
from .switch import Calls as Calls
from .switch import SwitchStages as SwitchStages
from .switch import stages_by_calls as stages_by_calls
from .tables import Totals as Totals
from .uniform import UniformStages as UniformStages
from .vocabulary import lookups_in as lookups_in
from .vocabulary import partition_by_tokens as partition_by_tokens
from .vocabulary import with_partitioned_loss as with_partitioned_loss
