"""Parallelisms as strategies: composable values that define the shardings of arrays.

Nothing here runs a step; `step` builds one from a strategy. Imports `collectives`, `nn`,
`ir`, `ops`, `sharding`, `schedule`, `mesh` and `core`. Start reading in `strategy.py`.
"""

from ..core.lazy import moved
from .context import ContextMode as ContextMode
from .context import context_parallel as context_parallel
from .data import ZERO as ZERO
from .data import ShardingStrategy as ShardingStrategy
from .data import ZeROStage as ZeROStage
from .data import ddp as ddp
from .data import diloco as diloco
from .data import fsdp as fsdp
from .data import local_sgd as local_sgd
from .data import zero as zero
from .expert import EXPERTS as EXPERTS
from .expert import MIX as MIX
from .expert import SUM_SAMPLES as SUM_SAMPLES
from .expert import ByExperts as ByExperts
from .expert import ExpertForm as ExpertForm
from .expert import expert_parallel as expert_parallel
from .expert import has_experts as has_experts
from .expert import map_experts as map_experts
from .expert import mark_experts_per_sample as mark_experts_per_sample
from .expert import sum_over_ranks as sum_over_ranks
from .kernels import LossOverMesh as LossOverMesh
from .kernels import map_kernels as map_kernels
from .memory import FSDPMemoryStats as FSDPMemoryStats
from .memory import estimate as estimate
from .memory import format_bytes as format_bytes
from .memory import measure as measure
from .pipelining import pipelined as pipelined
from .registry import STRATEGIES as STRATEGIES
from .registry import DataPlan as DataPlan
from .registry import ModelPlan as ModelPlan
from .registry import StrategyRow as StrategyRow
from .registry import data_axes as data_axes
from .registry import resolve_name as resolve_name
from .strategy import AdaptLayers as AdaptLayers
from .strategy import HasStrategy as HasStrategy
from .strategy import Reduction as Reduction
from .strategy import Strategy as Strategy
from .strategy import as_strategy as as_strategy
from .strategy import compose as compose
from .strategy import overlay as overlay
from .strategy import per_layer as per_layer
from .strategy import resolve_setting as resolve_setting
from .strategy import with_masters as with_masters
from .strategy_rules import STRATEGY_RULES as STRATEGY_RULES
from .strategy_rules import PlacedStrategy as PlacedStrategy
from .strategy_values import DEFAULT_SYNC_EVERY as DEFAULT_SYNC_EVERY
from .strategy_values import AutoWrapPolicy as AutoWrapPolicy
from .strategy_values import CPUOffload as CPUOffload
from .strategy_values import OuterLoop as OuterLoop
from .strategy_values import PipelinePlan as PipelinePlan
from .strategy_values import SizeBasedAutoWrapPolicy as SizeBasedAutoWrapPolicy
from .strategy_values import TransformerAutoWrapPolicy as TransformerAutoWrapPolicy
from .suggest import Suggestion as Suggestion
from .suggest import suggest_plan as suggest_plan
from .tensor import check_sums as check_sums
from .tensor import ring_products as ring_products
from .tensor import sends_pieces as sends_pieces
from .tensor import tensor_parallel as tensor_parallel
from .tensor_plan import PRESETS as PRESETS
from .tensor_plan import ByPlan as ByPlan
from .tensor_plan import Plan as Plan
from .tensor_plan import Rule as Rule
from .tensor_plan import plan_of as plan_of

__getattr__ = moved(__name__, "axon_dist.step.gather", "axon_dist.wrappers")
