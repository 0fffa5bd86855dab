"""The `axon` command: a table of verbs, each a thin function over a public one of `axon_dist.app`.

Importing it imports no other room. Start reading in `main.py`; the table is in `verbs.py`.
"""
