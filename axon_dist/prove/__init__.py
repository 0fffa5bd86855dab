"""Any parallel program against itself on one device, and where two programs part.

A program on a mesh whose axes are all 1 is its own oracle: nothing else says what it should
compute. Imports `step`, `jaxpr`, `mesh` and `core`. Start reading in `check.py`; a program as a
list of operations is in `program.py`, the way back from a wrong output in `locate.py`.
"""

from .check import MeshVariant as MeshVariant
from .check import assert_mesh_invariant as assert_mesh_invariant
from .check import prove as prove
from .report import Finding as Finding
from .report import Kind as Kind
from .report import Output as Output
from .report import Place as Place
from .report import Report as Report
