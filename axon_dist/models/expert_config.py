"""The config of a mixture of experts, where it was first documented; it stands beside its model's.

Example:
    >>> ExpertConfig(count=64, per_token=6).validate()
"""

from .transformer_config import ExpertConfig as ExpertConfig
