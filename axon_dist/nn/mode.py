"""What becomes of a layer when a mesh axis splits the model."""

from __future__ import annotations

from ..core.choice import Choice


class ParallelMode(Choice):
    """How a layer takes part in tensor parallelism."""

    COLUMN = "column"
    """Output features are split: whole inputs, split outputs."""
    ROW = "row"
    """Input features are split: split inputs, and outputs that are summed over the ranks."""
    SEQUENCE = "sequence"
    """Norms, dropout and residuals: the sequence is split where sequence parallelism is on."""
    VOCAB = "vocab"
    """The rows of a token table, or the logits of a head, are split."""
    REPLICATE = "replicate"
    """Every rank computes the whole."""
