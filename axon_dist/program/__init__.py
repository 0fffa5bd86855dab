"""Tools over traced programs: units, loops over layers, pieces, and the flow of dims through them.

Imports `core` alone. Start reading in `walk.py`, the few ways in which all others read a jaxpr;
then `units.py`, `layer_scan.py` and `piece.py`.
"""

from .affine import Meeting as Meeting
from .affine import find_meeting as find_meeting
from .calls import HELD as HELD
from .calls import Layers as Layers
from .calls import layers_of as layers_of
from .calls import wrap_calls as wrap_calls
from .convolution import ByRank as ByRank
from .layer_scan import SHARED as SHARED
from .layer_scan import Chain as Chain
from .layer_scan import find_chains as find_chains
from .layer_scan import handed_on as handed_on
from .layer_scan import is_unit as is_unit
from .layer_scan import scan_over_layers as scan_over_layers
from .linen import bridges_of as bridges_of
from .linen import linen_blocks as linen_blocks
from .linen import linen_modules as linen_modules
from .linen import linen_named as linen_named
from .piece import Piece as Piece
from .piece import cut as cut
from .piece import whole as whole
from .randomness import Rows as Rows
from .randomness import find_rows as find_rows
from .randomness import with_rank as with_rank
from .randomness import without_rank as without_rank
from .reads import read_in_loops as read_in_loops
from .reads import read_once as read_once
from .reads import read_outside_units as read_outside_units
from .rewrite import Rewriting as Rewriting
from .stacks import num_stacked as num_stacked
from .stacks import stacks_of as stacks_of
from .units import GATHER as GATHER
from .units import IsUnit as IsUnit
from .units import RematPolicy as RematPolicy
from .units import check_some as check_some
from .units import is_in_any as is_in_any
from .units import is_inside as is_inside
from .units import mark_units as mark_units
from .units import names_of as names_of
from .units import units_of as units_of
from .walk import CALLS as CALLS
from .walk import REMATS as REMATS
from .walk import Known as Known
from .walk import called as called
from .walk import depends_on as depends_on
from .walk import equations as equations
from .walk import in_branches as in_branches
from .walk import interpret as interpret
from .walk import made_by as made_by
from .walk import moves_with as moves_with
from .walk import needed_for as needed_for
from .walk import opened as opened
from .walk import sources_of as sources_of
from .walk import variables as variables
from .whole_slices import whole_slices as whole_slices
