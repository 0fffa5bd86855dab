"""Arithmetic without a mesh: attention, rings, losses, routing, precisions.

Imports `core` and `jaxpr` alone; nothing here knows of devices.
"""
