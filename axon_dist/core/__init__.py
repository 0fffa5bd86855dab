"""Errors, type aliases, tree paths and JAX's private names, for all other packages.

Imports no other package of this library. Start reading in `errors.py`.
"""
