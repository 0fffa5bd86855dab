"""Numerical operations: attention, rings, losses, expert routing, precision.

This package imports only `core`. Nothing in it takes a mesh; some functions read the axes of the
mesh in context.
"""
