"""Parallelisms as strategies: values that say where arrays lie, and compose.

Nothing here runs a step; `step` builds it from the strategy. Imports `collectives`, `nn`,
`precision`, `sharding`, `schedule`, `mesh` and `core`. Start reading in `strategy.py`.
"""

from .context import ContextMode as ContextMode
from .context import context_parallel as context_parallel
from .ddp import DDP as DDP
from .ddp import DistributedDataParallel as DistributedDataParallel
from .ddp import ddp as ddp
from .fsdp import FSDP as FSDP
from .fsdp import FullyShardedDataParallel as FullyShardedDataParallel
from .fsdp import ShardingStrategy as ShardingStrategy
from .fsdp import fsdp as fsdp
from .gather import GlobalGather as GlobalGather
from .gather import Held as Held
from .gather import Int8Gather as Int8Gather
from .gather import LocalGather as LocalGather
from .gather import ReduceHeld as ReduceHeld
from .gather import all_gather_by as all_gather_by
from .gather import only_axes as only_axes
from .gather import reduce_by as reduce_by
from .gather import regather_in_backward as regather_in_backward
from .kernels import map_kernels as map_kernels
from .losses import LossOverMesh as LossOverMesh
from .memory import FSDPMemoryStats as FSDPMemoryStats
from .memory import estimate as estimate
from .memory import format_bytes as format_bytes
from .memory import measure as measure
from .offload import CPUOffload as CPUOffload
from .pipeline_plan import PipelinePlan as PipelinePlan
from .pipelining import Pipeline as Pipeline
from .pipelining import PipelineStage as PipelineStage
from .pipelining import StageChain as StageChain
from .pipelining import pipelined as pipelined
from .plan import PRESETS as PRESETS
from .plan import ByPlan as ByPlan
from .plan import Plan as Plan
from .plan import Rule as Rule
from .plan import plan_of as plan_of
from .reduce import reduce_tree as reduce_tree
from .registry import STRATEGIES as STRATEGIES
from .registry import data_axes as data_axes
from .rules import STRATEGY_RULES as STRATEGY_RULES
from .rules import Placed as Placed
from .strategy import AdaptLayers as AdaptLayers
from .strategy import HasStrategy as HasStrategy
from .strategy import Reduction as Reduction
from .strategy import Strategy as Strategy
from .strategy import as_strategy as as_strategy
from .strategy import compose as compose
from .strategy import overlay as overlay
from .strategy import per_layer as per_layer
from .strategy import with_masters as with_masters
from .suggest import Suggestion as Suggestion
from .suggest import suggest_plan as suggest_plan
from .tensor import check_sums as check_sums
from .tensor import tensor_parallel as tensor_parallel
from .wrap import AutoWrapPolicy as AutoWrapPolicy
from .wrap import SizeBasedAutoWrapPolicy as SizeBasedAutoWrapPolicy
from .wrap import TransformerAutoWrapPolicy as TransformerAutoWrapPolicy
from .zero import ZERO as ZERO
from .zero import ZeROOptimizer as ZeROOptimizer
from .zero import ZeROStage as ZeROStage
from .zero import zero as zero
