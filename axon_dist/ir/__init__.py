"""Tools over traced programs: units, loops over layers, pieces, and the flow of dims through them.

Imports `core` and a name of `ops`. Start reading in `walk.py`, the few ways in which all others
read a jaxpr; then `units.py`, `layer_scan.py` and `pieces.py`. What each primitive does with dims
is in `factors.py`; the separability proof is in `samples.py`, its rules in `sample_rules.py`.
"""
