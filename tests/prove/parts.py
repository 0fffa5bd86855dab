"""Data, and small models, of the programs that are proven here."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = [
    "BATCH", "BIAS", "DATA", "KEY", "LABELS", "MASK", "SEQUENCE", "TARGETS", "TOKENS",
    "TOKEN_MASK", "WEIGHTS", "Net", "net", "normal", "placed", "sharded", "squared",
]  # fmt: skip

_RNG = np.random.default_rng(0)


def normal(*shape):
    return _RNG.normal(size=shape).astype(np.float32)


BATCH = normal(16, 8)
TARGETS = normal(16, 4)
MASK = (np.arange(16) % 3 > 0).astype(np.float32)
TOKENS = _RNG.integers(0, 16, (8, 12)).astype(np.int32)
LABELS = _RNG.integers(0, 16, (8, 12)).astype(np.int32)
TOKEN_MASK = (_RNG.random((8, 12)) < 0.7).astype(np.float32)
SEQUENCE = normal(2, 16, 8)
WEIGHTS = {"up": 0.3 * normal(8, 8), "down": 0.3 * normal(8, 4)}
BIAS = normal(4)
KEY = jax.random.key(3)
DATA = P("dp")


def net(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def squared(weights, x, y):
    return jnp.mean(jnp.sum((net(weights, x) - y) ** 2, -1))


def sharded(mesh, function, ins, outs, check=True):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check)
    )


def placed(mesh, *specs):
    return tuple(NamedSharding(mesh, spec) for spec in specs)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def lines_of(program):
    """The lines of a program that are marked, and the file."""
    if isinstance(program, functools.partial):
        # A program of a table of pairs is bound to its name and to whether it is wrong.
        program = program.args[0]
    code = program.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    start = code.co_firstlineno
    end = max([line for *_, line in code.co_lines() if line] + _inner_lines(code))
    marked = {n for n in range(start, end + 3) if n <= len(lines) and "# wrong" in lines[n - 1]}
    return code.co_filename, marked


def _inner_lines(code):
    found = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += [line for *_, line in constant.co_lines() if line] + _inner_lines(constant)
    return found
