"""The `axon` command: a table of verbs, each a thin function over the public API of other packages.

Importing this package imports `core` and `schedule`, but not JAX. Start reading in `main.py`; the
table is in `verbs.py`.
"""
