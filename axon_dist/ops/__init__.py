"""Numerical operations: attention, rings, losses, expert routing, precision.

This package imports only `core`. Nothing in it depends on a mesh or on devices.
"""
