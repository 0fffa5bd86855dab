"""Tools over traced programs: units, rolled loops, pieces, and the flow of dims through them.

Imports `core` alone. Start reading in `units.py`, then `rolling.py` and `piece.py`.
"""

from .calls import wrap_calls as wrap_calls
from .convolution import ByRank as ByRank
from .piece import cut as cut
from .piece import depends_on as depends_on
from .rewrite import Rewriting as Rewriting
from .rolling import find_chains as find_chains
from .rolling import roll as roll
from .units import GATHER as GATHER
from .units import IsUnit as IsUnit
from .units import RematPolicy as RematPolicy
from .units import check_some as check_some
from .units import is_inside as is_inside
from .units import mark_units as mark_units
from .units import units_of as units_of
from .whole_slices import whole_slices as whole_slices
