"""Mixture of experts: a feed-forward in which a router chooses experts for every token."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axon_dist.core.tree import wide
from axon_dist.core.typing import Array, Shape
from axon_dist.ops.routing import Choice, Product, in_order

from .config import ACTIVATIONS, ExpertConfig
from .layers import GatedMLP, PlainMLP, init_std
from .transformer_config import TransformerConfig


class RouterBias(nnx.Variable):
    """A bias added to the probabilities of experts only for the choice; it has no gradient."""


class ExpertReport(nnx.Variable):
    """The `Findings` of an expert layer in its last training pass, as one array."""


class Findings(NamedTuple):
    """The auxiliary loss terms and metrics of expert layers.

    Args:
        balance: the load-balancing term, unweighted.
        router_z: the z-loss term, unweighted.
        dropped: the share of assignments dropped because an expert was full.
        load: the load of the busiest expert, as a multiple of an even share.
    """

    balance: Array
    router_z: Array
    dropped: Array
    load: Array


class Experts(nnx.Module):
    """`sum over chosen e of g_e expert_e(x)`, plus the shared expert, for each token.

    The experts are stacked: `up` and `gate` are `[E, D, F]`, `down` is `[E, F, D]`. The method
    `mix_experts` computes the experts for all tokens, and `sum_samples` all sums over samples, so
    that a strategy can replace both.

    Args:
        config: sizes and numerics, including `config.experts`.
        rngs: source of the initial weights.
    """

    hidden_dims = MappingProxyType({"gate": -1, "up": -1, "down": -2})
    """The dim of hidden features of each kernel."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        experts = config.experts
        assert experts is not None
        width = config.width
        hidden = config.expert_size
        std = init_std(config)

        def make(shape: Shape, std: float) -> nnx.Param:
            draw = nnx.initializers.normal(std)
            return nnx.Param(draw(rngs.params(), shape, jnp.dtype(config.param_dtype)))

        self.router = make((width, experts.count), std)
        if config.gated:
            self.gate = make((experts.count, width, hidden), std)
        self.up = make((experts.count, width, hidden), std)
        self.down = make((experts.count, hidden, width), std / (2 * config.num_layers) ** 0.5)
        if experts.shared:
            shared = dataclasses.replace(config, ffn_width=experts.shared * hidden)
            kind = GatedMLP if config.gated else PlainMLP
            self.shared_mlp = kind(shared, rngs=rngs)
        if experts.bias_rate:
            self.bias = RouterBias(jnp.zeros((experts.count,), jnp.float32))
        self.report = ExpertReport(jnp.zeros((len(Findings._fields),), jnp.float32))
        self.experts: ExpertConfig = experts
        self.activation: str = config.activation
        self.dtype = config.dtype and jnp.dtype(config.dtype)
        # `eval()` sets it to True: evaluation neither updates the bias nor stores a report.
        self.deterministic: bool = False

    @property
    def kernels(self) -> dict[str, Array]:
        """The stacked kernels by name."""
        return {name: getattr(self, name)[...] for name in self.hidden_dims if hasattr(self, name)}

    @property
    def idle_share(self) -> dict[str, float]:
        """The share of each stacked kernel that is inactive for a token: `1 - k / E`."""
        share = 1 - self.experts.per_token / self.experts.count
        return {name: share for name in self.hidden_dims if hasattr(self, name)}

    def __call__(self, x: Array) -> Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        kernels = self.kernels
        dtype = self.dtype or jnp.result_type(x, *kernels.values())
        kernels = {name: kernel.astype(dtype) for name, kernel in kernels.items()}
        x = x.astype(dtype)
        logits = wide(x) @ wide(self.router[...])
        scores = jax.nn.softmax(logits, axis=-1)
        gates, expert_ids = self._choose(scores)
        mixed, dropped = self.mix_experts(x, gates, expert_ids, kernels)
        if not self.deterministic:
            self._learn(logits, scores, expert_ids, dropped)
        return mixed + self.shared_mlp(x) if hasattr(self, "shared_mlp") else mixed

    def mix_experts(
        self, tokens: Array, gates: Array, expert_ids: Array, kernels: dict[str, Array]
    ) -> tuple[Array, Array]:
        """Sums the outputs of the chosen experts for each token, weighted by their gates.

        Args:
            tokens: `[B, T, D]`.
            gates: float32 `[B, T, k]`.
            expert_ids: int32 `[B, T, k]`, the indices of the chosen experts.
            kernels: the kernels of all experts.

        Returns:
            `[B, T, D]`, and the share of dropped assignments, which is 0 here.
        """

        def flat(x):
            return x.reshape(-1, x.shape[-1])

        choice = Choice(flat(expert_ids), flat(gates))
        mixed = in_order(self.feed, flat(tokens), choice, kernels)
        return mixed.reshape(tokens.shape), jnp.zeros((), jnp.float32)

    def feed(self, product: Product, rows: Array, kernels: dict[str, Array]) -> Array:
        """Applies each expert to its rows."""
        hidden = product(rows, kernels["up"])
        if "gate" in kernels:
            hidden = ACTIVATIONS[self.activation](product(rows, kernels["gate"])) * hidden
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return product(hidden, kernels["down"])

    def sum_samples(self, x: Array) -> tuple[Array, int]:
        """Sums over the samples of a batch.

        Args:
            x: `[B, ...]`.

        Returns:
            The sums `[...]`, in the dtype of `x`, and the number of samples.
        """
        return jnp.sum(x, axis=0, dtype=x.dtype), x.shape[0]

    def _choose(self, scores: Array) -> tuple[Array, Array]:
        """Returns the gates and the indices of the chosen experts, `[B, T, k]`."""
        ranked = jax.lax.stop_gradient(scores)
        if self.experts.bias_rate:
            ranked = ranked + jax.lax.broadcast_to_rank(self.bias[...], ranked.ndim)
        _, expert_ids = jax.lax.top_k(ranked, self.experts.per_token)
        gates = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if self.experts.divides_gates:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        return gates, expert_ids

    def _learn(self, logits: Array, scores: Array, expert_ids: Array, dropped: Array) -> None:
        """Stores the report for the loss, and updates the bias."""
        experts = self.experts
        count = experts.count
        chosen = expert_ids[..., None]
        numbers = jax.lax.broadcast_to_rank(jnp.arange(count), chosen.ndim)
        is_routed = jnp.any(chosen == numbers, axis=-2)
        # Count in integers: a float sum depends on the order of addition, which could flip the sign
        # of its difference from the mean and thus the update of the bias.
        counts = jnp.sum(is_routed, axis=1, dtype=jnp.int32)
        each = expert_ids.shape[1] * experts.per_token
        total, samples = self.sum_samples(counts)
        of_batch = total / (samples * each)
        probability = jnp.mean(scores, axis=1)
        is_of_batch = experts.balance_per == "batch"
        of_sample = jnp.sum(counts / each * probability, axis=-1, keepdims=True)
        router_z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2, axis=1, keepdims=True)
        # One sum for both, because it is a collective if ranks have different samples.
        summands = [probability if is_of_batch else of_sample, router_z]
        total, samples = self.sum_samples(jnp.concatenate(summands, axis=-1))
        mean = (total / samples)[:-1]
        mean_z = (total / samples)[-1]
        balance = count * jnp.sum(of_batch * mean if is_of_batch else mean)
        findings = Findings(balance, mean_z, dropped, count * jnp.max(of_batch))
        self.report.set_value(jnp.stack(findings))
        if experts.bias_rate:
            moved = experts.bias_rate * jnp.sign(1 / count - of_batch)
            self.bias.set_value(self.bias[...] + moved)
