"""Reads and rewrites traced programs: units, loops over layers, pieces, relations of dims.

Start reading in `walk.py`, the few ways in which all others read a jaxpr; then `units.py`,
`layer_scan.py` and `pieces.py`. `factors.py` says how the dims of each primitive's results relate
to those of its operands.
"""
