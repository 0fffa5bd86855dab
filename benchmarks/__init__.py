"""Measurements, each printed beside what it is measured against in the same run."""
