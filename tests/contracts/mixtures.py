"""The cases of mixtures of experts, in stages and without."""

import optax

SIZES = {"width": 16, "ffn_width": 16, "vocab_size": 32, "max_length": 16, "num_layers": 2}
EXPERTS = {"count": 8, "shared": 1, "balance": 0.1, "z_loss": 0.01, "bias_rate": 0.01}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
}
