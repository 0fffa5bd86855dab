"""Any parallel program against itself on one device, and where two programs part.

A program on a mesh whose axes are all 1 is its own oracle: nothing else says what it should
compute. Imports `step`, `parallel`, `jaxpr`, `mesh` and
`core`. Start reading in `check.py`; a program as a
list of operations is in `program.py`, the way back from a wrong output in `locate.py`. A name is
imported when it is asked for: pytest loads the plugin of this package in every run.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .check import MeshVariant as MeshVariant
    from .check import assert_mesh_invariant as assert_mesh_invariant
    from .check import prove as prove
    from .file import bisect_files as bisect_files
    from .file import prove_file as prove_file
    from .parting import Parting as Parting
    from .parting import bisect as bisect
    from .report import Finding as Finding
    from .report import Kind as Kind
    from .report import Output as Output
    from .report import Place as Place
    from .report import Report as Report
    from .strategies import prove_strategy as prove_strategy

_NAMES = {
    "parting": "Parting bisect",
    "check": "MeshVariant assert_mesh_invariant prove",
    "file": "bisect_files prove_file",
    "report": "Finding Kind Output Place Report",
    "strategies": "prove_strategy",
}
_FILE_OF = {name: file for file, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Imports the file that defines a name."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
