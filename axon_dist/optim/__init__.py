"""Optimizers that need matrices whole, and how these are distributed over the devices.

Imports `core`, `program` and `sharding`. Start reading in `muon.py`; `deal.py` is what makes it
cost one exchange there and back per kind of matrix on any mesh.
"""

from .deal import Distribution as Distribution
from .deal import Distributor as Distributor
from .groups import by_path as by_path
from .groups import matrices as matrices
from .muon import NewtonSchulz as NewtonSchulz
from .muon import hidden_matrices as hidden_matrices
from .muon import muon as muon
from .watch import Spikes as Spikes
from .watch import watched as watched
