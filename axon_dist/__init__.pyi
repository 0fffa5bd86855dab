from .checkpoint import CheckpointManager as CheckpointManager
from .checkpoint import StateDictType as StateDictType
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .collectives import GradientBucket as GradientBucket
from .collectives import GradientSynchronizer as GradientSynchronizer
from .collectives import ReduceOp as ReduceOp
from .collectives import all_gather as all_gather
from .collectives import all_reduce as all_reduce
from .collectives import all_reduce_max as all_reduce_max
from .collectives import all_reduce_mean as all_reduce_mean
from .collectives import all_reduce_min as all_reduce_min
from .collectives import all_reduce_product as all_reduce_product
from .collectives import all_reduce_sum as all_reduce_sum
from .collectives import all_to_all as all_to_all
from .collectives import barrier as barrier
from .collectives import broadcast as broadcast
from .collectives import broadcast_from as broadcast_from
from .collectives import gather_tensor as gather_tensor
from .collectives import is_main_process as is_main_process
from .collectives import rank as rank
from .collectives import reduce_scatter_mean as reduce_scatter_mean
from .collectives import reduce_scatter_sum as reduce_scatter_sum
from .collectives import scatter_tensor as scatter_tensor
from .collectives import send_recv as send_recv
from .collectives import shift as shift
from .collectives import sync_gradient as sync_gradient
from .collectives import sync_gradients as sync_gradients
from .collectives import world_size as world_size
from .core.errors import AxonDistError as AxonDistError
from .core.weighted import Shared as Shared
from .core.weighted import Weighted as Weighted
from .core.weighted import per_sample as per_sample
from .mesh import Backend as Backend
from .mesh import MeshSpec as MeshSpec
from .mesh import ProcessGroup as ProcessGroup
from .mesh import World as World
from .models import generate as generate
from .nn import ActivationCheckpointing as ActivationCheckpointing
from .nn import ColumnParallelLinear as ColumnParallelLinear
from .nn import ParallelMLP as ParallelMLP
from .nn import RowParallelLinear as RowParallelLinear
from .nn import TensorParallelAttention as TensorParallelAttention
from .nn import VocabParallelEmbedding as VocabParallelEmbedding
from .nn import linear_cross_entropy as linear_cross_entropy
from .nn import linear_scores as linear_scores
from .nn import lora as lora
from .nn import merge_lora as merge_lora
from .optim import hidden_matrices as hidden_matrices
from .optim import muon as muon
from .parallel import Reduction as Reduction
from .parallel import Strategy as Strategy
from .parallel import compose as compose
from .parallel import context_parallel as context_parallel
from .parallel import ddp as ddp
from .parallel import diloco as diloco
from .parallel import expert_parallel as expert_parallel
from .parallel import fsdp as fsdp
from .parallel import local_sgd as local_sgd
from .parallel import pipelined as pipelined
from .parallel import suggest_plan as suggest_plan
from .parallel import tensor_parallel as tensor_parallel
from .parallel import zero as zero
from .precision import GradScaler as GradScaler
from .precision import MixedPrecision as MixedPrecision
from .precision import autocast as autocast
from .schedule import PipelineMemoryStats as PipelineMemoryStats
from .step import TrainState as TrainState
from .step import TrainStep as TrainStep
from .step import build_train_step as build_train_step
from .train.app import load_model as load_model
from .train.loop import LoopOptions as LoopOptions
from .train.loop import Trainer as Trainer
from .weights import hub_config as hub_config
from .weights import load_weights as load_weights
from .weights import save_weights as save_weights
from .wrappers import DDP as DDP
from .wrappers import FSDP as FSDP
from .wrappers import CPUOffload as CPUOffload
from .wrappers import DistributedDataParallel as DistributedDataParallel
from .wrappers import FSDPMemoryStats as FSDPMemoryStats
from .wrappers import FullyShardedDataParallel as FullyShardedDataParallel
from .wrappers import GradSyncStrategy as GradSyncStrategy
from .wrappers import ParallelMode as ParallelMode
from .wrappers import Pipeline as Pipeline
from .wrappers import PipelineSchedule as PipelineSchedule
from .wrappers import PipelineStage as PipelineStage
from .wrappers import ShardingStrategy as ShardingStrategy
from .wrappers import SizeBasedAutoWrapPolicy as SizeBasedAutoWrapPolicy
from .wrappers import TransformerAutoWrapPolicy as TransformerAutoWrapPolicy
from .wrappers import ZeROOptimizer as ZeROOptimizer
from .wrappers import ZeROStage as ZeROStage

__version__: str

__all__ = [
    "DDP",
    "FSDP",
    "ActivationCheckpointing",
    "AxonDistError",
    "CheckpointManager",
    "GradScaler",
    "LoopOptions",
    "MeshSpec",
    "MixedPrecision",
    "Pipeline",
    "Shared",
    "Strategy",
    "TrainState",
    "TrainStep",
    "Trainer",
    "Weighted",
    "World",
    "build_train_step",
    "compose",
    "context_parallel",
    "ddp",
    "diloco",
    "expert_parallel",
    "fsdp",
    "generate",
    "hidden_matrices",
    "hub_config",
    "is_main_process",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_model",
    "load_weights",
    "local_sgd",
    "lora",
    "merge_lora",
    "muon",
    "per_sample",
    "pipelined",
    "save_checkpoint",
    "save_weights",
    "suggest_plan",
    "tensor_parallel",
    "zero",
]
