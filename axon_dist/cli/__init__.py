"""The `axon` command: one thin file per verb over a public function, and a table of the verbs.

Imports every room; importing it starts no backend. Start reading in `main.py`.
"""
