"""Collectives, and buckets for averaging gradients.

Every collective can be called in two places with the same meaning: inside `shard_map` it acts on
this rank's value; outside it acts on rank-stacked arrays, in which row r is the value of rank r.
Imports `mesh` and `core`. Start reading in `reduce.py`, then `place.py`; buckets are in
`buckets.py`.
"""

from .buckets import DEFAULT_CAPACITY as DEFAULT_CAPACITY
from .buckets import BucketPlan as BucketPlan
from .buckets import GradSyncStrategy as GradSyncStrategy
from .buckets import plan_buckets as plan_buckets
from .buckets import reduce_buckets as reduce_buckets
from .compressed import Compression as Compression
from .compressed import Quantized as Quantized
from .compressed import TopK as TopK
from .compressed import compression_of as compression_of
from .move import Mailbox as Mailbox
from .move import all_gather as all_gather
from .move import all_to_all as all_to_all
from .move import broadcast as broadcast
from .move import broadcast_from as broadcast_from
from .move import gather_tensor as gather_tensor
from .move import reduce_scatter_mean as reduce_scatter_mean
from .move import reduce_scatter_sum as reduce_scatter_sum
from .move import ring_all_reduce as ring_all_reduce
from .move import scatter_tensor as scatter_tensor
from .move import send_recv as send_recv
from .move import shift as shift
from .place import barrier as barrier
from .place import is_main_process as is_main_process
from .place import rank as rank
from .place import world_size as world_size
from .reduce import ReduceOp as ReduceOp
from .reduce import all_reduce as all_reduce
from .reduce import all_reduce_max as all_reduce_max
from .reduce import all_reduce_mean as all_reduce_mean
from .reduce import all_reduce_min as all_reduce_min
from .reduce import all_reduce_product as all_reduce_product
from .reduce import all_reduce_sum as all_reduce_sum
from .reduce import reduce_slices as reduce_slices
from .synchronizer import GradientBucket as GradientBucket
from .synchronizer import GradientSynchronizer as GradientSynchronizer
from .synchronizer import sync_gradient as sync_gradient
from .synchronizer import sync_gradients as sync_gradients
