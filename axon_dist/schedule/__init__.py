"""Pipeline schedules as tables: build, validate, simulate, draw.

A `Schedule` contains the actions of every device in every tick; `axon_dist.pipeline` runs it. This
package is plain Python: it imports only modules of `core` that do not need jax.
Start reading in `table.py`, then `builders.py`.
"""

from .action import TOGETHER as TOGETHER
from .action import Action as Action
from .action import Cell as Cell
from .action import Phase as Phase
from .action import receiver as receiver
from .builders import eager_1f1b as eager_1f1b
from .builders import gpipe as gpipe
from .builders import interleaved_1f1b as interleaved_1f1b
from .builders import interleaved_zero_bubble as interleaved_zero_bubble
from .builders import looped_bfs as looped_bfs
from .builders import one_f_one_b as one_f_one_b
from .builders import zero_bubble_h1 as zero_bubble_h1
from .builders import zero_bubble_h2 as zero_bubble_h2
from .draw import draw as draw
from .draw import to_svg as to_svg
from .memory import IN_FLIGHT_ENDS as IN_FLIGHT_ENDS
from .memory import STASH_ENDS as STASH_ENDS
from .memory import PipelineMemoryStats as PipelineMemoryStats
from .memory import SlotPlan as SlotPlan
from .memory import Slots as Slots
from .memory import assign_slots as assign_slots
from .memory import peak_live as peak_live
from .registry import SCHEDULES as SCHEDULES
from .registry import PipelineSchedule as PipelineSchedule
from .registry import ScheduleSummary as ScheduleSummary
from .registry import Unavailable as Unavailable
from .registry import build_schedule as build_schedule
from .registry import compare as compare
from .registry import efficiency as efficiency
from .registry import min_microbatches as min_microbatches
from .registry import pipeline_advice as pipeline_advice
from .registry import split_advice as split_advice
from .registry import summarize as summarize
from .search import SearchResult as SearchResult
from .search import for_stages as for_stages
from .search import search as search
from .simulate import Costs as Costs
from .simulate import Payload as Payload
from .simulate import Timeline as Timeline
from .simulate import Transfer as Transfer
from .simulate import simulate as simulate
from .simulate import transfers as transfers
from .stages import partition as partition
from .stages import stage_ranges as stage_ranges
from .table import PlacedAction as PlacedAction
from .table import Schedule as Schedule
from .table import order_to_table as order_to_table
from .v_shaped import dual_pipe_v as dual_pipe_v
from .v_shaped import v_half as v_half
from .v_shaped import v_min as v_min
from .v_shaped import zero_bubble_v as zero_bubble_v
from .validate import validate as validate
from .validate import with_vocabulary as with_vocabulary

Placed = PlacedAction  # the name in version 0.1
