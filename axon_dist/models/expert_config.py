"""The config of a mixture of experts."""

from __future__ import annotations

import dataclasses

from ..core.errors import ConfigError, did_you_mean
from .config import check_at_least_one

BALANCE = ("batch", "sequence")
"""Over what the balance term counts the tokens of each expert."""


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """The feed-forward of every block as a mixture of experts; says nothing of devices.

    A router gives each token a probability for every expert, `p = softmax(x W)`; the `per_token`
    most probable ones are chosen, and the token gets `sum g_e expert_e(x)` over these. Their gates
    `g` are the probabilities, by default divided by their sum where there are several.

    Args:
        count: how many experts there are, E.
        per_token: how many of them a token goes to, k.
        width: hidden size of one expert; None for that of the config's feed-forward.
        shared: how many further experts every token goes to, as one feed-forward of so many times
            the width (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        balance: by how much the balance term counts, `E sum_e f_e P_e` with the share f of the
            assignments that expert e gets and its mean probability P (Switch Transformers,
            arXiv:2101.03961, equation 4); it is 1 where all experts get as much. 0 leaves it out.
        balance_per: `"batch"` counts over all tokens of a (micro)batch, on all devices, and
            therefore couples its samples: K microbatches have K such terms, and their mean;
            `"sequence"` counts in each sequence by itself and takes the mean, which is the same
            number however a batch is cut (DeepSeek-V3, arXiv:2412.19437, equation 17).
        z_loss: by how much `mean(logsumexp(x W)^2)` counts, which keeps the logits of the router
            small (ST-MoE, arXiv:2202.08906, equation 5). 0 leaves it out.
        normalize: divide the gates by their sum where a token goes to several experts.
        bias_rate: by how much a bias of each expert moves after each (micro)batch, up where the
            expert got fewer tokens than the mean, else down. It is added to the probabilities for
            the choice alone, not to the gates, and has no gradient (DeepSeek-V3, section 2.1.2). It
            is a buffer of the model. 0 leaves it out.

    Example:
        >>> ExpertConfig(count=64, per_token=6, shared=2).validate()
    """

    count: int = 8
    per_token: int = 2
    width: int | None = None
    shared: int = 0
    balance: float = 0.01
    balance_per: str = "batch"
    z_loss: float = 0.0
    normalize: bool = True
    bias_rate: float = 0.0

    def validate(self) -> None:
        """Checks that the numbers fit each other.

        Raises:
            ConfigError: a number is out of range, or a name is unknown.
        """
        check_at_least_one(self, ("count", "per_token", *(("width",) if self.width else ())))
        if self.per_token > self.count:
            raise ConfigError(
                f"experts.per_token={self.per_token} is more than experts.count={self.count}: a "
                "token goes to different experts; lower the one or raise the other."
            )
        for field in ("shared", "balance", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(
                    f"experts.{field}={getattr(self, field)} must be 0 or more; set it so."
                )
        if self.balance_per not in BALANCE:
            hint = did_you_mean(self.balance_per, BALANCE)
            raise ConfigError(f"experts.balance_per={self.balance_per!r} is not known.{hint}")
