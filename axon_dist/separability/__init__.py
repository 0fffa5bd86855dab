"""Proves from the traced program of a loss that the loss is a sum over samples.

It compares the programs for two numbers of samples, those of a part and of the whole batch.

`abstract_values.py` has the abstract values: how an array depends on the samples. `rules.py` and
`indexing.py` have the transfer rule of each primitive, written with `Operation` of `operation.py`.
`interpret.py` follows a program from its samples to its loss. `step/separation.py` runs this
analysis and acts on the result.
"""
