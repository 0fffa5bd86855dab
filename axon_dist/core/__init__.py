"""The words every room shares: errors, type aliases, tree paths, and the unstable names of JAX.

Imports nothing of ours. Start reading in `errors.py`.
"""
