"""Measurements; each prints its reference from the same run next to it."""
