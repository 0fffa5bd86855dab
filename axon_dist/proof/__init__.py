"""The proof that a loss is a sum over samples, read from its traced program.

`lattice.py` has the values that say how an array depends on the samples; `rules.py` and
`indexing.py` say what each primitive does to them, written with `Operation` of `operation.py`;
`interpret.py` follows a program from its samples to its loss. `step/separable.py` asks for the
proof and decides by it.
"""
