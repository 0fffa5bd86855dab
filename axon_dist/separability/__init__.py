"""Proves from the traced program of a loss how its outputs depend on the samples of the batch.

An output is a mean over the samples, a sum, a weighted mean, or cannot be computed from the values
of the parts. The analysis compares the programs for two numbers of samples, those of a part and of
the whole batch.

`abstract_values.py` has the abstract values: how an array depends on the samples. `rules.py` and
`indexing.py` have the transfer rule of each primitive, written with `Operation` of `operation.py`.
`interpret.py` follows a program from its samples to its loss. `step/separation.py` runs this
analysis and acts on the result.
"""
