"""The `axon` command: a table of verbs, each a thin function over public ones of the rooms below.

Importing it imports `core` and `schedule`, and no JAX. Start reading in `main.py`; the table is in
`verbs.py`.
"""
