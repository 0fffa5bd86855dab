"""Any parallel program against itself on one device, and where two programs part.

A program on a mesh whose axes are all 1 is its own oracle: nothing else says what it should
compute. Start reading in `check.py`; a program as a list of operations is in `program.py`, the way
back from a wrong output in `locate.py`. A name is imported when it is first used, because pytest
loads the plugin of this package in every run.
"""

from ..core.lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__, __file__)
