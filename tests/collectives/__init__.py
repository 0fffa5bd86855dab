"""Collectives against the dense expression, on eight emulated devices."""
