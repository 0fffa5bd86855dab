"""Reads and rewrites traced programs: units, loops over layers, slices, relations between dims.

Start with `walk.py`: all other modules read a jaxpr through it. Then read `units.py`,
`layer_scan.py` and `pieces.py`. `factors.py` describes, for each primitive, how the dims of its
results relate to the dims of its operands.
"""
