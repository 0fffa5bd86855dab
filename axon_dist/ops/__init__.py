"""Arithmetic without a mesh: attention, rings, losses, routing, precisions.

Imports `core` alone; nothing here knows of devices.
"""
