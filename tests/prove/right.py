"""Right parallel programs, in which nothing may be found.

Each is `make(mesh, check)`, most are tried with and without the check of what varies.
"""

# ruff: noqa: F403, F405

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from .parts import *

RIGHT = {}
DOWN = 0.3 * normal(8, 8)
TABLE = 0.5 * normal(16, 8)
LABELS_OF_8 = (np.arange(16) * 5 % 8).astype(np.int32)
EXPERTS = 0.4 * normal(4, 8, 8)
ROUTES = (np.arange(16) * 7 % 4).astype(np.int32)
LAYERS = 0.4 * normal(4, 8, 8)


def right(checks=(True, False)):
    def add(make):
        for check in checks:
            name = make.__name__ + ("" if check else "-unchecked")
            RIGHT[name] = functools.partial(_made, make, check)
        return make

    return add


def _made(make, check, mesh):
    return make(mesh, check)


# ---------------------------------------------------------------- data parallel


@right()
def mean_loss(mesh, check):
    def loss(w, x, y):
        return lax.pmean(squared(w, x, y), "dp")

    return sharded(mesh, loss, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def copies_for_each_sample(mesh, check):
    def loss(w, x, y):
        scores = net(w, jnp.tile(x[:, :4], (1, 2)))
        shift = jnp.tile(w["down"][:1], (len(x), 1))
        return lax.pmean(jnp.mean((scores + shift - y) ** 2), "dp")

    return sharded(mesh, loss, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def masked_loss(mesh, check):
    def loss(w, x, y, m):
        errors = jnp.sum((net(w, x) - y) ** 2, -1)
        return lax.psum(jnp.sum(errors * m), "dp") / lax.psum(jnp.sum(m), "dp")

    run = sharded(mesh, loss, (P(), DATA, DATA, DATA), P(), check)
    return run, (WEIGHTS, BATCH, TARGETS, MASK)


@right((False,))
def gradients_by_pmean(mesh, check):
    def step(w, x, y):
        loss, grads = jax.value_and_grad(squared)(w, x, y)
        grads = lax.pmean(grads, "dp")
        return lax.pmean(loss, "dp"), jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right((True,))
def gradients_by_jax(mesh, check):
    def step(w, x, y):
        grads = jax.grad(lambda w: lax.pmean(squared(w, x, y), "dp"))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def gradients_outside(mesh, check):
    def loss(w, x, y):
        return lax.pmean(squared(w, x, y), "dp")

    run = sharded(mesh, loss, (P(), DATA, DATA), P(), check)
    return jax.grad(run), (WEIGHTS, BATCH, TARGETS)


@right((False,))
def adam_by_hand(mesh, check):
    tx = optax.adamw(1e-2)

    def step(w, state, x, y):
        grads = lax.pmean(jax.grad(squared)(w, x, y), "dp")
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    run = sharded(mesh, step, (P(), P(), DATA, DATA), P(), check)
    return run, (WEIGHTS, tx.init(WEIGHTS), BATCH, TARGETS)


@right((False,))
def accumulated_gradients(mesh, check):
    def step(w, x, y):
        parts = x.reshape(2, -1, 8), y.reshape(2, -1, 4)

        def turn(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(squared)(w, *part)), None

        total, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, w), parts)
        return jax.tree.map(lambda g: lax.pmean(g, "dp") / 2, total)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right((False,))
def clip_after_the_mean(mesh, check):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))

    def step(w, x, y):
        grads = lax.pmean(jax.grad(squared)(w, x, y), "dp")
        return tx.update(grads, tx.init(w))[0]

    return sharded(mesh, step, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def batch_norm_synchronised(mesh, check):
    def norm(x):
        mean = lax.pmean(x.mean(0), "dp")
        variance = lax.pmean(((x - mean) ** 2).mean(0), "dp")
        return (x - mean) * lax.rsqrt(variance + 1e-5)

    return sharded(mesh, norm, (DATA,), DATA, check), (BATCH,)


@right((False,))
def module_batch_norm_synchronised(mesh, check):
    graph, state = nnx.split(nnx.BatchNorm(8, axis_name="dp", rngs=nnx.Rngs(0)))

    def body(state, x):
        layer = nnx.merge(graph, state)
        out = layer(x)
        return out, nnx.state(layer)

    return sharded(mesh, body, (P(), DATA), (DATA, P()), check), (state, BATCH)


@right()
def norm_of_shards(mesh, check):
    def clip(g):
        norm = jnp.sqrt(lax.psum(jnp.sum(g * g), ("dp", "tp")))
        return g * jnp.minimum(1.0, 1.0 / norm)

    spec = P("dp", "tp")
    return sharded(mesh, clip, (spec,), spec, check), (BATCH,)


@right()
def weighted_accuracy(mesh, check):
    def body(scores, labels, valid):
        hits = lax.psum(((scores.argmax(-1) == labels) * valid).sum(), "dp")
        return hits / jnp.maximum(lax.psum(valid.sum(), "dp"), 1.0)

    return sharded(mesh, body, (DATA, DATA, DATA), P(), check), (BATCH, LABELS_OF_8, MASK)


# ---------------------------------------------------------------- random bits


@right()
def dropout_with_folded_keys(mesh, check):
    def body(key, x):
        key = jax.random.fold_in(key, lax.axis_index("dp"))
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    return sharded(mesh, body, (P(), DATA), DATA, check), (KEY, BATCH)


@right()
def dropout_with_split_keys(mesh, check):
    def body(keys, x):
        return x * jax.random.bernoulli(keys[0], 0.5, x.shape)

    run = sharded(mesh, body, (DATA, DATA), DATA, check)

    def outer(key, x):
        return run(jax.random.split(key, mesh.shape["dp"]), x)

    return outer, (KEY, BATCH)


@right()
def dropout_of_global_bits(mesh, check):
    def body(key, x):
        keep = jax.random.bernoulli(key, 0.5, (16, 8))
        at = lax.axis_index("dp") * x.shape[0]
        return x * lax.dynamic_slice_in_dim(keep, at, x.shape[0])

    return sharded(mesh, body, (P(), DATA), DATA, check), (KEY, BATCH)


@right()
def noise_of_each_sample(mesh, check):
    def body(key, x):
        first = lax.axis_index("dp") * x.shape[0]
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(first + jnp.arange(x.shape[0]))
        return x + jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)

    return sharded(mesh, body, (P(), DATA), DATA, check), (KEY, BATCH)


@right()
def dropout_of_hidden_parts_folded(mesh, check):
    def body(key, up, down, x):
        for axis in ("dp", "tp"):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        hidden = jnp.tanh(x @ up)
        hidden = hidden * jax.random.bernoulli(key, 0.7, hidden.shape)
        return lax.psum(hidden @ down, "tp")

    ins = (P(), P(None, "tp"), P("tp"), DATA)
    args = (KEY, WEIGHTS["up"], WEIGHTS["down"], BATCH)
    return sharded(mesh, body, ins, DATA, check), args


@right()
def same_noise_on_replicas(mesh, check):
    def body(key, w):
        return w + 0.1 * jax.random.normal(key, w.shape)

    return sharded(mesh, body, (P(), P()), P(), check), (KEY, WEIGHTS["up"])


@right((True,))
def dropout_by_jit(mesh, check):
    def body(key, x):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    return jax.jit(body, in_shardings=placed(mesh, P(), DATA)), (KEY, BATCH)


@right()
def dropout_in_a_loop(mesh, check):
    def body(key, layers, x):
        key = jax.random.fold_in(key, lax.axis_index("dp"))

        def layer(x, given):
            w, number = given
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
            return x + jnp.tanh(x @ w) * keep, None

        return lax.scan(layer, x, (layers, jnp.arange(layers.shape[0])))[0]

    return sharded(mesh, body, (P(), P(), DATA), DATA, check), (KEY, LAYERS, BATCH)


# ---------------------------------------------------------------- tensor parallel


@right()
def megatron_mlp(mesh, check):
    def mlp(up, down, bias, x):
        return lax.psum(jax.nn.gelu(x @ up) @ down, "tp") + bias

    ins = (P(None, "tp"), P("tp"), P(), DATA)
    args = (WEIGHTS["up"], WEIGHTS["down"], BIAS, BATCH)
    return sharded(mesh, mlp, ins, DATA, check), args


@right()
def megatron_mlp_gradients(mesh, check):
    def loss(up, down, x, y):
        out = lax.psum(jnp.tanh(x @ up) @ down, "tp")
        return lax.pmean(jnp.mean((out - y) ** 2), "dp")

    ins = (P(None, "tp"), P("tp"), DATA, DATA)
    run = sharded(mesh, loss, ins, P(), check)
    args = (WEIGHTS["up"], WEIGHTS["down"], BATCH, TARGETS)
    return jax.value_and_grad(run, (0, 1)), args


@right()
def megatron_with_sequence(mesh, check):
    def block(up, down, scale, x):
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        h = lax.all_gather(h, "tp", axis=1, tiled=True)
        out = jax.nn.silu(h @ up) @ down
        return x + lax.psum_scatter(out, "tp", scatter_dimension=1, tiled=True)

    spec = P(None, "tp")
    ins = (P(None, "tp"), P("tp"), P(), spec)
    args = (WEIGHTS["up"], DOWN, normal(8), SEQUENCE)
    return sharded(mesh, block, ins, spec, check), args


@right()
def attention_by_heads(mesh, check):
    def attend(q, k, v, o, x):
        def heads(w):
            return (x @ w).reshape(*x.shape[:2], -1, 2)

        queries, keys, values = heads(q), heads(k), heads(v)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys)
        rows = jnp.arange(x.shape[1])
        scores = jnp.where(rows[:, None] >= rows[None], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
        return lax.psum(mixed.reshape(*x.shape[:2], -1) @ o, "tp")

    ins = (*(P(None, "tp"),) * 3, P("tp"), P())
    return sharded(mesh, attend, ins, P(), check), (*LAYERS[:3], DOWN, SEQUENCE)


@right()
def norm_of_hidden_parts(mesh, check):
    def norm(x, scale):
        squares = lax.pmean(jnp.mean(x * x, -1, keepdims=True), "tp")
        return x * lax.rsqrt(squares + 1e-6) * scale

    spec = P("dp", "tp")
    return sharded(mesh, norm, (spec, P("tp")), spec, check), (BATCH, normal(8))


@right()
def vocabulary_parallel_lookup(mesh, check):
    def lookup(table, tokens):
        at = tokens - lax.axis_index("tp") * table.shape[0]
        inside = (at >= 0) & (at < table.shape[0])
        rows = table[jnp.clip(at, 0, table.shape[0] - 1)]
        return lax.psum(jnp.where(inside[..., None], rows, 0.0), "tp")

    return sharded(mesh, lookup, (P("tp"), DATA), DATA, check), (TABLE, TOKENS)


@right()
def vocabulary_parallel_loss(mesh, check):
    def loss(x, w, labels):
        scores = x @ w
        most = lax.pmax(lax.stop_gradient(scores.max(-1)), "tp")
        total = lax.psum(jnp.exp(scores - most[:, None]).sum(-1), "tp")
        at = labels - lax.axis_index("tp") * scores.shape[1]
        hit = at[:, None] == jnp.arange(scores.shape[1])[None]
        picked = lax.psum(jnp.where(hit, scores, 0.0).sum(-1), "tp")
        return lax.pmean((most + jnp.log(total) - picked).mean(), "dp")

    run = sharded(mesh, loss, (DATA, P(None, "tp"), DATA), P(), check)
    return run, (BATCH, WEIGHTS["up"], LABELS_OF_8)


@right()
def vocabulary_parallel_gradients(mesh, check):
    run, args = vocabulary_parallel_loss(mesh, check)
    return jax.value_and_grad(run, (0, 1)), args


@right()
def softmax_over_parts(mesh, check):
    def body(scores):
        most = lax.pmax(scores.max(-1, keepdims=True), "tp")
        exps = jnp.exp(scores - most)
        return exps / lax.psum(exps.sum(-1, keepdims=True), "tp")

    spec = P("dp", "tp")
    return sharded(mesh, body, (spec,), spec, check), (BATCH,)


@right()
def softmax_rescaled(mesh, check):
    def body(scores):
        mine = scores.max(-1, keepdims=True)
        exps = jnp.exp(scores - mine)
        most = lax.pmax(mine, "tp")
        scale = jnp.exp(mine - most)
        return exps * scale / lax.psum(exps.sum(-1, keepdims=True) * scale, "tp")

    spec = P("dp", "tp")
    return sharded(mesh, body, (spec,), spec, check), (BATCH,)


@right()
def argmax_over_parts(mesh, check):
    def predict(scores):
        best = scores.max(-1)
        at = scores.argmax(-1) + lax.axis_index("tp") * scores.shape[1]
        most = lax.pmax(best, "tp")
        return lax.pmin(jnp.where(best == most, at, 2**20), "tp")

    return sharded(mesh, predict, (P("dp", "tp"),), DATA, check), (BATCH,)


@right()
def column_then_gather(mesh, check):
    def body(w, x):
        out = lax.all_gather(x @ w, "tp", axis=1, tiled=True)
        return lax.pmean(out, "tp")

    ins = (P(None, "tp"), DATA)
    return sharded(mesh, body, ins, DATA, check), (WEIGHTS["up"], BATCH)


@right()
def collective_matmul(mesh, check):
    size = mesh.shape["tp"]

    def body(w, x):
        """Each turn multiplies the part that is there, and hands it on."""
        rank = lax.axis_index("tp")
        out = jnp.zeros((x.shape[0] * size, w.shape[1]), x.dtype)
        out = lax.pcast(out, ("dp", "tp"), to="varying") if check else out
        for turn in range(size):
            at = (rank - turn) % size * x.shape[0]
            out = lax.dynamic_update_slice(out, x @ w, (at, 0))
            x = lax.ppermute(x, "tp", [(i, (i + 1) % size) for i in range(size)])
        return out

    ins = (P(None, "tp"), P(("dp", "tp")))
    return sharded(mesh, body, ins, P("dp", "tp"), check), (WEIGHTS["up"], BATCH)


# ---------------------------------------------------------------- context parallel


def _ring(mesh, check, causal):
    size = mesh.shape["dp"]

    def attend(q, k, v):
        rank, length = lax.axis_index("dp"), q.shape[1]
        rows = rank * length + jnp.arange(length)
        most = jnp.full(q.shape[:2], -1e30, q.dtype)
        total, out = jnp.zeros(q.shape[:2], q.dtype), jnp.zeros_like(q)
        if check:
            most, total = (lax.pcast(a, "dp", to="varying") for a in (most, total))
        for turn in range(size):
            columns = (rank - turn) % size * length + jnp.arange(length)
            scores = jnp.einsum("bqd,bkd->bqk", q, k)
            if causal:
                scores = jnp.where(rows[:, None] >= columns[None], scores, -1e30)
            new = jnp.maximum(most, scores.max(-1))
            weights = jnp.exp(scores - new[..., None])
            shrunk = jnp.exp(most - new)
            total = total * shrunk + weights.sum(-1)
            out = out * shrunk[..., None] + jnp.einsum("bqk,bkd->bqd", weights, v)
            most = new
            pairs = [(i, (i + 1) % size) for i in range(size)]
            k, v = lax.ppermute((k, v), "dp", pairs)
        return out / total[..., None]

    spec = P(None, "dp")
    run = sharded(mesh, attend, (spec,) * 3, spec, check)
    return run, (SEQUENCE, SEQUENCE[:, ::-1], 2 * SEQUENCE)


@right()
def ring_attention(mesh, check):
    return _ring(mesh, check, False)


@right()
def ring_attention_causal(mesh, check):
    return _ring(mesh, check, True)


@right()
def ring_attention_gradients(mesh, check):
    run, args = _ring(mesh, check, True)
    return jax.grad(lambda *a: jnp.sum(run(*a) ** 2), (0, 1, 2)), args


@right((False,))
def ring_attention_in_a_loop(mesh, check):
    size = mesh.shape["dp"]

    def attend(q, k, v):
        def turn(_, carry):
            k, v, total, out = carry
            weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) / 8)
            pairs = [(i, (i + 1) % size) for i in range(size)]
            out = out + jnp.einsum("bqk,bkd->bqd", weights, v)
            return *lax.ppermute((k, v), "dp", pairs), total + weights.sum(-1), out

        start = (k, v, jnp.zeros(q.shape[:2]), jnp.zeros_like(q))
        *_, total, out = lax.fori_loop(0, size, turn, start)
        return out / total[..., None]

    spec = P(None, "dp")
    return sharded(mesh, attend, (spec,) * 3, spec, check), (SEQUENCE, SEQUENCE, SEQUENCE)


@right()
def ulysses(mesh, check):
    x = normal(2, 16, 4, 8)

    def attend(q, k, v):
        def to_heads(a):
            return lax.all_to_all(a, "dp", split_axis=2, concat_axis=1, tiled=True)

        q, k, v = to_heads(q), to_heads(k), to_heads(v)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return lax.all_to_all(out, "dp", split_axis=1, concat_axis=2, tiled=True)

    spec = P(None, "dp")
    return sharded(mesh, attend, (spec,) * 3, spec, check), (x, 0.5 * x, x[::-1])


@right()
def gathered_keys(mesh, check):
    def attend(q, k):
        keys = lax.all_gather(k, "dp", axis=1, tiled=True)
        scores = q @ jnp.swapaxes(keys, 1, 2)
        rows = lax.axis_index("dp") * q.shape[1] + jnp.arange(q.shape[1])
        seen = rows[:, None] >= jnp.arange(keys.shape[1])[None]
        return jax.nn.softmax(jnp.where(seen, scores, -1e9)) @ keys

    spec = P(None, "dp")
    return sharded(mesh, attend, (spec, spec), spec, check), (SEQUENCE, SEQUENCE[:, ::-1])


@right()
def positions_with_offset(mesh, check):
    def body(table, x):
        at = lax.axis_index("dp") * x.shape[1]
        angle = (at + jnp.arange(x.shape[1]))[:, None] * 0.5 ** jnp.arange(8)
        return x * jnp.cos(angle) + lax.dynamic_slice_in_dim(table, at, x.shape[1])

    spec = P(None, "dp")
    return sharded(mesh, body, (P(), spec), spec, check), (normal(16, 8), SEQUENCE)


@right()
def shifted_by_one_token(mesh, check):
    size = mesh.shape["dp"]

    def body(x):
        """Each token gets the one before it, the first of a rank from its neighbour."""
        pairs = [(i, (i + 1) % size) for i in range(size)]
        before = lax.ppermute(x[:, -1:], "dp", pairs)
        is_first = lax.axis_index("dp") == 0
        before = jnp.where(is_first, jnp.zeros_like(before), before)
        return jnp.concatenate([before, x[:, :-1]], 1)

    spec = P(None, "dp")
    return sharded(mesh, body, (spec,), spec, check), (SEQUENCE,)


# ---------------------------------------------------------------- experts


@right()
def expert_dispatch(mesh, check):
    def body(experts, x, routes):
        """Each rank has some experts, takes the tokens of its own, and all results are added."""
        own = experts.shape[0]
        first = lax.axis_index("tp") * own
        out = jnp.zeros_like(x)
        for number in range(own):
            mine = (routes == first + number)[:, None]
            out = out + jnp.where(mine, jnp.tanh(x @ experts[number]), 0.0)
        return lax.psum(out, "tp")

    ins = (P("tp"), DATA, DATA)
    return sharded(mesh, body, ins, DATA, check), (EXPERTS, BATCH, ROUTES)


@right()
def expert_all_to_all(mesh, check):
    tokens = normal(16, 4, 8)

    def body(experts, x):
        """Row e of a sample goes to expert e, which is on another rank, and back."""
        sent = lax.all_to_all(x, "dp", split_axis=1, concat_axis=0, tiled=True)
        out = jnp.einsum("tec,ecd->ted", sent, experts)
        return lax.all_to_all(out, "dp", split_axis=0, concat_axis=1, tiled=True)

    return sharded(mesh, body, (DATA, DATA), DATA, check), (EXPERTS, tokens)


@right()
def load_balance_loss(mesh, check):
    def body(x, w):
        shares = jax.nn.softmax(x @ w)
        chosen = jax.nn.one_hot(shares.argmax(-1), w.shape[1])
        means = lax.pmean((shares.mean(0), chosen.mean(0)), "dp")
        return (means[0] * means[1]).sum()

    return sharded(mesh, body, (DATA, P()), P(), check), (BATCH, WEIGHTS["down"])


# ---------------------------------------------------------------- ZeRO by hand


@right()
def gathered_weights(mesh, check):
    def loss(w, x, y):
        full = jax.tree.map(lambda a: lax.all_gather(a, "dp", axis=0, tiled=True), w)
        return lax.pmean(squared(full, x, y), "dp")

    run = sharded(mesh, loss, (DATA, DATA, DATA), P(), check)
    return jax.value_and_grad(run), (WEIGHTS, BATCH, TARGETS)


@right((False,))
def zero_by_hand(mesh, check):
    tx = optax.adam(1e-2)

    def step(w, x, y):
        full = jax.tree.map(lambda a: lax.all_gather(a, "dp", axis=0, tiled=True), w)
        grads = jax.grad(squared)(full, x, y)
        size = lax.axis_size("dp")
        grads = jax.tree.map(
            lambda g: lax.psum_scatter(g, "dp", scatter_dimension=0, tiled=True) / size, grads
        )
        updates, state = tx.update(grads, tx.init(w))
        return optax.apply_updates(w, updates), state[0].mu

    return sharded(mesh, step, (DATA, DATA, DATA), DATA, check), (WEIGHTS, BATCH, TARGETS)


@right((False,))
def sharded_optimizer(mesh, check):
    def step(w, momentum, x, y):
        """ZeRO-1: each rank updates a part of the weights, and all get the parts."""
        grad = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w), "dp")
        rows = momentum.shape[0]
        at = lax.axis_index("dp") * rows
        momentum = 0.9 * momentum + lax.dynamic_slice_in_dim(grad, at, rows)
        part = lax.dynamic_slice_in_dim(w, at, rows) - 0.1 * momentum
        return lax.all_gather(part, "dp", axis=0, tiled=True), momentum

    run = sharded(mesh, step, (P(), DATA, DATA, DATA), (P(), DATA), check)
    return run, (normal(8, 4), normal(8, 4), BATCH, TARGETS)


@right((False,))
def flat_padded_shards(mesh, check):
    size = mesh.shape["dp"]
    weights = normal(13)

    def step(w, x):
        grad = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w[:8]) ** 2))(w), "dp")
        padded = jnp.pad(grad, (0, -len(grad) % size))
        part = padded.reshape(size, -1)[lax.axis_index("dp")]
        full = lax.all_gather(part * 0.1, "dp", axis=0, tiled=True)
        return w - full[: len(grad)]

    return sharded(mesh, step, (P(), DATA), P(), check), (weights, BATCH)


# ---------------------------------------------------------------- pipelines


@right((False,))
def pipeline_by_ppermute(mesh, check):
    size = mesh.shape["dp"]

    def run(layers, x):
        """Microbatches go from rank to rank; the last rank's results are those of all."""
        rank, count = lax.axis_index("dp"), 4
        parts = x.reshape(count, -1, 8)

        def stage(a):
            return lax.scan(lambda a, w: (jnp.tanh(a @ w), None), a, layers)[0]

        def tick(carry, turn):
            held, done = carry
            given = parts[jnp.clip(turn, 0, count - 1)]
            out = stage(jnp.where(rank == 0, given, held))
            at = turn - (size - 1)
            is_done = (rank == size - 1) & (at >= 0)
            old = done[jnp.maximum(at, 0)]
            done = done.at[jnp.maximum(at, 0)].set(jnp.where(is_done, out, old))
            pairs = [(i, (i + 1) % size) for i in range(size)]
            return (lax.ppermute(out, "dp", pairs), done), None

        start = jnp.zeros_like(parts[0]), jnp.zeros_like(parts)
        (_, done), _ = lax.scan(tick, start, jnp.arange(count + size - 1))
        return lax.psum(done, "dp").reshape(x.shape)

    return sharded(mesh, run, (DATA, P()), P(), check), (LAYERS, BATCH)


@right((False,))
def pipeline_gradients(mesh, check):
    run, args = pipeline_by_ppermute(mesh, check)
    return jax.grad(lambda w, x: jnp.mean(run(w, x) ** 2), (0, 1)), args


# ---------------------------------------------------------------- DiLoCo, local steps


@right((False,))
def average_of_models(mesh, check):
    def outer(w, x, y):
        """One local step of SGD, whose mean over the ranks is one step on all samples."""
        grads = jax.grad(squared)(w, x, y)
        local = jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
        delta = jax.tree.map(lambda a, b: lax.pmean(a - b, "dp"), local, w)
        return jax.tree.map(lambda p, d: p + 0.7 * d, w, delta)

    return sharded(mesh, outer, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def replicas_as_rows(mesh, check):
    replicas = jax.tree.map(lambda a: np.stack([a] * 4), WEIGHTS)
    parts = (BATCH.reshape(4, 4, 8), TARGETS.reshape(4, 4, 4))

    def inner(w, x, y):
        def steps(w, x, y):
            for _ in range(2):
                grads = jax.grad(squared)(w, x, y)
                w = jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
            return w

        return jax.vmap(steps)(w, x, y)

    run = sharded(mesh, inner, (DATA,) * 3, DATA, check)

    def outer(w, x, y):
        return jax.tree.map(lambda a: a.mean(0), run(w, x, y))

    return outer, (replicas, *parts)


# ---------------------------------------------------------------- jit with shardings, NNX


@right((True,))
def train_step_by_jit(mesh, check):
    tx = optax.adamw(1e-2)

    def step(w, state, x, y):
        loss, grads = jax.value_and_grad(squared)(w, x, y)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss

    ins = placed(mesh, P("tp"), P(), DATA, DATA)
    run = jax.jit(step, in_shardings=ins, donate_argnums=0)
    return run, (WEIGHTS, tx.init(WEIGHTS), BATCH, TARGETS)


@right((True,))
def constraints_by_jit(mesh, check):
    (rows, columns) = placed(mesh, P("dp", None), P("dp", "tp"))

    def run(w, x):
        hidden = lax.with_sharding_constraint(x @ w["up"], columns)
        return lax.with_sharding_constraint(jnp.tanh(hidden) @ w["down"], rows)

    return jax.jit(run), (WEIGHTS, BATCH)


@right((True,))
def module_step_by_nnx(mesh, check):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, BATCH, TARGETS)


@right((False,))
def module_in_shard_map(mesh, check):
    graph, state = nnx.split(Net(nnx.Rngs(1)))

    def step(state, x, y):
        def loss(state):
            return jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)

        grads = lax.pmean(jax.grad(loss)(state), "dp")
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check), (state, BATCH, TARGETS)


@right((True,))
def token_loss_by_jit(mesh, check):
    def loss(table, tokens, labels, mask):
        scores = jax.nn.log_softmax(table[tokens] @ table.T)
        picked = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
        return -(picked * mask).sum() / mask.sum()

    ins = placed(mesh, P("tp"), DATA, DATA, DATA)
    return jax.jit(jax.value_and_grad(loss), in_shardings=ins), (
        TABLE, TOKENS, LABELS, TOKEN_MASK,
    )  # fmt: skip


@right((True,))
def groups_by_jit(mesh, check):
    groups = mesh.shape["dp"]

    def loss(w, x, y):
        parts = x.reshape(groups, -1, 8), y.reshape(groups, -1, 4)
        return jax.vmap(squared, (None, 0, 0))(w, *parts).mean()

    return jax.jit(jax.grad(loss), in_shardings=placed(mesh, P(), DATA, DATA)), (
        WEIGHTS, BATCH, TARGETS,
    )  # fmt: skip


@right()
def partly_manual(mesh, check):
    def body(w, x):
        return lax.pmean(jnp.tanh(x @ w).sum(-1).mean(), "dp")

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), DATA), out_specs=P(), axis_names={"dp"}, check_vma=check
    )
    return jax.jit(run), (WEIGHTS["up"], BATCH)


@right()
def half_precision(mesh, check):
    def loss(w, x, y):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x))
        out = net(*half).astype(jnp.float32)
        return lax.psum(jnp.sum((out - y) ** 2), "dp") / 16

    run = sharded(mesh, loss, (P(), DATA, DATA), P(), check)
    return jax.value_and_grad(run), (WEIGHTS, BATCH, TARGETS)


@right()
def gather_then_pick(mesh, check):
    def body(x):
        full = lax.all_gather(x, ("dp", "tp"), axis=0, tiled=True)
        return lax.pmean(full[3] + full[-1], ("dp", "tp"))

    return sharded(mesh, body, (P(("dp", "tp")),), P(), check), (BATCH,)


@right()
def halo_exchange(mesh, check):
    size = mesh.shape["dp"]

    def smooth(x):
        left = lax.ppermute(x[-1:], "dp", [(i, (i + 1) % size) for i in range(size)])
        right_ = lax.ppermute(x[:1], "dp", [(i, (i - 1) % size) for i in range(size)])
        wide = jnp.concatenate([left, x, right_])
        return (wide[:-2] + wide[1:-1] + wide[2:]) / 3

    return sharded(mesh, smooth, (DATA,), DATA, check), (BATCH,)


@right()
def prefix_sum(mesh, check):
    def body(x):
        sums = jnp.cumsum(x, 0)
        totals = lax.all_gather(sums[-1], "dp")
        before = jnp.arange(totals.shape[0]) < lax.axis_index("dp")
        return sums + (totals * before[:, None]).sum(0)

    return sharded(mesh, body, (DATA,), DATA, check), (BATCH,)


@right()
def summed_by_two_axes(mesh, check):
    def body(x):
        total = lax.psum(lax.psum(x.sum(), "dp"), "tp")
        count = lax.psum(x.size, ("dp", "tp"))
        return total / count

    return sharded(mesh, body, (P("dp", "tp"),), P(), check), (BATCH,)


@right()
def power_iteration(mesh, check):
    def body(a, v):
        def turn(_, v):
            product = lax.psum(a.T @ (a @ v), "dp")
            return product / jnp.linalg.norm(product)

        return lax.fori_loop(0, 3, turn, v)

    return sharded(mesh, body, (DATA, P()), P(), check), (BATCH, normal(8))


@right()
def moving_average(mesh, check):
    def body(average, x):
        mean = lax.pmean(x.mean(0), "dp")
        return 0.9 * average + 0.1 * mean

    return sharded(mesh, body, (P(), DATA), P(), check), (normal(8), BATCH)


@right()
def largest_loss(mesh, check):
    def body(w, x, y):
        losses = jnp.sum((net(w, x) - y) ** 2, -1)
        return lax.pmax(losses.max(), "dp"), lax.pmin(losses.min(), "dp")

    return sharded(mesh, body, (P(), DATA, DATA), P(), check), (WEIGHTS, BATCH, TARGETS)


@right()
def contrastive_loss(mesh, check):
    def loss(a, b):
        others = lax.all_gather(b, "dp", axis=0, tiled=True)
        scores = a @ others.T / 8
        rows = lax.axis_index("dp") * a.shape[0] + jnp.arange(a.shape[0])
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), rows[:, None], 1)
        return -lax.pmean(picked.mean(), "dp")

    return sharded(mesh, loss, (DATA, DATA), P(), check), (BATCH, BATCH[::-1])


@right()
def features_standardized(mesh, check):
    def body(x):
        count = lax.psum(x.shape[0], "dp")
        mean = lax.psum(x.sum(0), "dp") / count
        variance = lax.psum(((x - mean) ** 2).sum(0), "dp") / count
        return (x - mean) / jnp.sqrt(variance + 1e-5)

    return sharded(mesh, body, (DATA,), DATA, check), (BATCH,)


@right()
def mean_gradient_scattered(mesh, check):
    def body(x, y):
        gradient = x.T @ y / x.shape[0]
        total = lax.psum_scatter(gradient, "dp", scatter_dimension=0, tiled=True)
        return total / lax.axis_size("dp")

    return sharded(mesh, body, (DATA, DATA), DATA, check), (BATCH, TARGETS)
