"""Sixty programs with a mistake, five of each kind; the line of the mistake is marked.

Each is `make(mesh)`, as users write it, and returns the function and its arguments.
"""

# ruff: noqa: F403, F405

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axon_dist.prove import Kind

from .parts import *

WRONG = {}


def mistake(kind):
    def add(make):
        WRONG[make.__name__] = (kind, make)
        return make

    return add


# ---------------------------------------------------------------- mean of means


@mistake(Kind.MEAN_OF_MEANS)
def masked_mean_checked(mesh):
    def loss(w, x, y, m):
        errors = jnp.sum((net(w, x) - y) ** 2, -1)
        total, count = jnp.sum(errors * m), jnp.sum(m)
        return lax.pmean(total / count, "dp")  # wrong

    return sharded(mesh, loss, (P(), DATA, DATA, DATA), P()), (WEIGHTS, BATCH, TARGETS, MASK)


@mistake(Kind.MEAN_OF_MEANS)
def masked_tokens_unchecked(mesh):
    table = 0.5 * normal(16, 16)

    def body(table, tokens, labels, mask):
        scores = jax.nn.log_softmax(table[tokens])
        picked = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
        mean = -(picked * mask).sum() / jnp.maximum(mask.sum(), 1.0)  # wrong
        return lax.pmean(mean, ("dp", "tp"))

    both = P(("dp", "tp"))
    run = sharded(mesh, body, (P(), both, both, both), P(), check=False)
    return run, (table, TOKENS, LABELS, TOKEN_MASK)


@mistake(Kind.MEAN_OF_MEANS)
def masked_groups_by_jit(mesh):
    groups = mesh.shape["dp"]

    def loss(w, x, y, m):
        errors = jnp.sum((net(w, x) - y) ** 2, -1).reshape(groups, -1)
        weights = m.reshape(groups, -1)
        each = (errors * weights).sum(1) / weights.sum(1)  # wrong
        return each.mean()

    ins = placed(mesh, P(), DATA, DATA, DATA)
    return jax.jit(loss, in_shardings=ins), (WEIGHTS, BATCH, TARGETS, MASK)


@mistake(Kind.MEAN_OF_MEANS)
def masked_gradient_of_a_module(mesh):
    model = Net(nnx.Rngs(0))
    graph, state = nnx.split(model)

    def body(state, x, y, m):
        def loss(state):
            errors = jnp.sum((nnx.merge(graph, state)(x) - y) ** 2, -1)
            return jnp.sum(errors * m) / jnp.sum(m)  # wrong

        value, grads = jax.value_and_grad(loss)(state)
        return lax.pmean(value, "dp"), jax.tree.map(lambda g: lax.pmean(g, "dp"), grads)

    run = sharded(mesh, body, (P(), DATA, DATA, DATA), P(), check=False)
    return run, (state, BATCH, TARGETS, MASK)


@mistake(Kind.MEAN_OF_MEANS)
def accuracy_of_valid_samples(mesh):
    def body(scores, labels, valid):
        right = (scores.argmax(-1) == labels) & (valid > 0)
        accuracy = right.sum() / (valid > 0).sum()  # wrong
        return lax.psum(accuracy, "dp") / lax.axis_size("dp")

    labels = np.where(np.arange(16) % 2, BATCH.argmax(-1), 0).astype(np.int32)
    return sharded(mesh, body, (DATA, DATA, DATA), P()), (BATCH, labels, MASK)


# ---------------------------------------------------------------- not reduced


@mistake(Kind.NOT_REDUCED)
def gradients_not_reduced(mesh):
    def step(w, x, y):
        grads = jax.grad(squared)(w, x, y)  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check=False), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.NOT_REDUCED)
def row_parallel_not_reduced(mesh):
    def mlp(up, down, x):
        hidden = jnp.tanh(x @ up)
        out = hidden @ down  # wrong
        return jax.nn.relu(out)

    ins = (P(None, "tp"), P("tp"), DATA)
    args = (WEIGHTS["up"], WEIGHTS["down"], BATCH)
    return sharded(mesh, mlp, ins, DATA, check=False), args


@mistake(Kind.NOT_REDUCED)
def norm_gradient_not_reduced(mesh):
    def step(scale, x):
        def loss(scale):
            return jnp.mean((x * scale) ** 2)

        value, grad = jax.value_and_grad(loss)(scale)  # wrong
        return lax.pmean(value, "dp"), scale - 0.5 * grad

    scale = normal(8)
    return sharded(mesh, step, (P(), DATA), P(), check=False), (scale, BATCH)


@mistake(Kind.NOT_REDUCED)
def first_group_by_jit(mesh):
    groups = mesh.shape["dp"]

    def step(w, x, y):
        parts = (x.reshape(groups, -1, 8), y.reshape(groups, -1, 4))
        grads = jax.vmap(jax.grad(squared), (None, 0, 0))(w, *parts)  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g[0], w, grads)  # wrong

    return jax.jit(step, in_shardings=placed(mesh, P(), DATA, DATA)), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.NOT_REDUCED)
def optimizer_of_local_gradients(mesh):
    graph, state = nnx.split(Net(nnx.Rngs(1)))
    sgd = optax.sgd(0.1)

    def step(state, x, y):
        def loss(state):
            return jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state)  # wrong
        updates, _ = sgd.update(grads, sgd.init(state))
        return lax.pmean(value, "dp"), optax.apply_updates(state, updates)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check=False), (state, BATCH, TARGETS)


# ---------------------------------------------------------------- reduced twice


@mistake(Kind.TWICE)
def gradient_summed_by_jax_and_again(mesh):
    def step(w, x, y):
        loss, grads = jax.value_and_grad(squared)(w, x, y)
        grads = jax.tree.map(lambda g: lax.pmean(g, "dp"), grads)  # wrong
        return lax.pmean(loss, "dp"), grads

    return sharded(mesh, step, (P(), DATA, DATA), P()), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.TWICE)
def activations_summed_twice(mesh):
    def mlp(up, down, x):
        out = lax.psum(jnp.tanh(x @ up) @ down, "tp")
        out = out * 0.5
        return lax.psum(out, "tp")  # wrong

    ins = (P(None, "tp"), P("tp"), DATA)
    args = (WEIGHTS["up"], WEIGHTS["down"], BATCH)
    return sharded(mesh, mlp, ins, DATA, check=False), args


@mistake(Kind.TWICE)
def loss_summed_twice(mesh):
    def loss(w, x, y):
        total = lax.psum(jnp.sum((net(w, x) - y) ** 2), "dp")
        count = lax.psum(jnp.float32(x.shape[0]), "dp")
        return lax.psum(total, "dp") / count  # wrong

    return sharded(mesh, loss, (P(), DATA, DATA), P(), check=False), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.TWICE)
def counts_summed_twice(mesh):
    def body(x, m):
        count = lax.psum(m.sum(), ("dp", "tp"))
        total = lax.psum((x.sum(-1) * m).sum(), ("dp", "tp"))
        total = lax.psum(total, "tp")  # wrong
        return total / count

    both = P(("dp", "tp"))
    return sharded(mesh, body, (both, both), P(), check=False), (BATCH, MASK)


@mistake(Kind.TWICE)
def module_gradient_summed_again(mesh):
    graph, state = nnx.split(Net(nnx.Rngs(1)))

    def step(state, x, y):
        def loss(state):
            return jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)

        grads = jax.grad(loss)(state)
        grads = lax.pmean(grads, "dp")  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P()), (state, BATCH, TARGETS)


# ---------------------------------------------------------------- sum for mean


@mistake(Kind.SUM_FOR_MEAN)
def loss_summed(mesh):
    def loss(w, x, y):
        return lax.psum(squared(w, x, y), "dp")  # wrong

    return sharded(mesh, loss, (P(), DATA, DATA), P()), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.SUM_FOR_MEAN)
def gradients_summed(mesh):
    def step(w, x, y):
        grads = jax.grad(squared)(w, x, y)
        grads = jax.tree.map(lambda g: lax.psum(g, "dp"), grads)  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P(), check=False), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.SUM_FOR_MEAN)
def gradients_summed_by_jax(mesh):
    def step(w, x, y):
        grads = jax.grad(squared)(w, x, y)  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    return sharded(mesh, step, (P(), DATA, DATA), P()), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.SUM_FOR_MEAN)
def groups_summed_by_jit(mesh):
    groups = mesh.shape["dp"]

    def loss(w, x, y):
        each = jax.vmap(squared, (None, 0, 0))(
            w, x.reshape(groups, -1, 8), y.reshape(groups, -1, 4)
        )
        return each.sum()  # wrong

    return jax.jit(loss, in_shardings=placed(mesh, P(), DATA, DATA)), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.SUM_FOR_MEAN)
def statistics_summed(mesh):
    def body(x):
        mean = lax.psum(x.mean(0), "dp")  # wrong
        return x - mean

    return sharded(mesh, body, (DATA,), DATA), (BATCH,)


# ---------------------------------------------------------------- bias before the sum


@mistake(Kind.BIAS)
def bias_on_every_rank(mesh):
    def mlp(up, down, bias, x):
        out = jnp.tanh(x @ up) @ down + bias  # wrong
        return lax.psum(out, "tp")

    ins = (P(None, "tp"), P("tp"), P(), DATA)
    args = (WEIGHTS["up"], WEIGHTS["down"], BIAS, BATCH)
    return sharded(mesh, mlp, ins, DATA), args


@mistake(Kind.BIAS)
def residual_on_every_rank(mesh):
    down = 0.3 * normal(8, 8)

    def block(up, down, x):
        hidden = jax.nn.gelu(x @ up)
        out = hidden @ down
        out = x + out  # wrong
        return lax.psum(out, "tp")

    ins = (P(None, "tp"), P("tp"), DATA)
    return sharded(mesh, block, ins, DATA, check=False), (WEIGHTS["up"], down, BATCH)


@mistake(Kind.BIAS)
def bias_before_the_scatter(mesh):
    def mlp(up, down, bias, x):
        hidden = jnp.tanh(x @ up)
        out = hidden @ down
        out = out + bias  # wrong
        return lax.psum_scatter(out, "tp", scatter_dimension=0, tiled=True)

    ins = (P(None, "tp"), P("tp"), P(), DATA)
    args = (WEIGHTS["up"], WEIGHTS["down"], BIAS, BATCH)
    return sharded(mesh, mlp, ins, P(("dp", "tp"))), args


@mistake(Kind.BIAS)
def bias_of_split_products_by_jit(mesh):
    parts = mesh.shape["tp"]

    def layer(w, b, x):
        rows = x.reshape(16, parts, -1)
        products = jnp.einsum("bpk,pko->pbo", rows, w.reshape(parts, -1, 4))
        return (products + b).sum(0)  # wrong

    ins = placed(mesh, P("tp"), P(), DATA)
    return jax.jit(layer, in_shardings=ins), (WEIGHTS["down"], BIAS, BATCH)


@mistake(Kind.BIAS)
def bias_of_a_module(mesh):
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(2), bias_init=nnx.initializers.normal(1.0))
    graph, state = nnx.split(layer)
    specs = jax.tree.map(lambda a: P("tp") if a.ndim == 2 else P(), state)

    def body(state, x):
        out = nnx.merge(graph, state)(x)  # wrong
        return lax.psum(out, "tp")

    return sharded(mesh, body, (specs, P("dp", "tp")), DATA), (state, BATCH)


# ---------------------------------------------------------------- one key for all


@mistake(Kind.ONE_KEY)
def dropout_with_one_key(mesh):
    def body(key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)  # wrong
        return jnp.where(keep, x / 0.5, 0.0)

    return sharded(mesh, body, (P(), DATA), DATA), (KEY, BATCH)


@mistake(Kind.ONE_KEY)
def noise_with_one_key(mesh):
    def step(w, x, y):
        noisy = x + 0.1 * jax.random.normal(KEY, x.shape)  # wrong
        loss, grads = jax.value_and_grad(squared)(w, noisy, y)
        return lax.pmean(loss, "dp"), lax.pmean(grads, "dp")

    return sharded(mesh, step, (P(), DATA, DATA), P(), check=False), (WEIGHTS, BATCH, TARGETS)


@mistake(Kind.ONE_KEY)
def dropout_of_hidden_parts(mesh):
    def mlp(key, up, down, x):
        hidden = jnp.tanh(x @ up)
        key = jax.random.fold_in(key, lax.axis_index("dp"))
        keep = jax.random.bernoulli(key, 0.8, hidden.shape)  # wrong
        return lax.psum(jnp.where(keep, hidden, 0) @ down, "tp")

    ins = (P(), P(None, "tp"), P("tp"), DATA)
    args = (KEY, WEIGHTS["up"], WEIGHTS["down"], BATCH)
    return sharded(mesh, mlp, ins, DATA, check=False), args


@mistake(Kind.ONE_KEY)
def groups_with_one_key_by_jit(mesh):
    groups = mesh.shape["dp"]

    def body(key, x):
        def drop(rows):
            return rows * jax.random.bernoulli(key, 0.5, rows.shape)  # wrong

        return jax.vmap(drop)(x.reshape(groups, -1, 8)).reshape(x.shape)

    return jax.jit(body, in_shardings=placed(mesh, P(), DATA)), (KEY, BATCH)


@mistake(Kind.ONE_KEY)
def module_dropout_with_one_key(mesh):
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graph, state = nnx.split(drop)

    def body(state, x):
        layer = nnx.merge(graph, state)
        return layer(x)  # wrong

    return sharded(mesh, body, (P(), DATA), DATA, check=False), (state, BATCH)


# ---------------------------------------------------------------- position not offset


@mistake(Kind.POSITION)
def positions_of_the_part(mesh):
    def body(x):
        positions = jnp.arange(x.shape[1])  # wrong
        return x + jnp.sin(positions)[:, None]

    spec = P(None, "dp")
    return sharded(mesh, body, (spec,), spec), (SEQUENCE,)


@mistake(Kind.POSITION)
def table_from_its_start(mesh):
    table = normal(16, 8)

    def body(table, x):
        length = x.shape[1]
        return x + table[:length]  # wrong

    spec = P(None, "dp")
    return sharded(mesh, body, (P(), spec), spec, check=False), (table, SEQUENCE)


@mistake(Kind.POSITION)
def rotary_of_the_part(mesh):
    def rotate(x):
        angle = jnp.arange(x.shape[1])[:, None] * 0.5 ** jnp.arange(4)  # wrong
        a, b = x[..., :4], x[..., 4:]
        return jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
        )

    def body(q, k):
        q, k = rotate(q), rotate(k)
        k = lax.all_gather(k, "dp", axis=1, tiled=True)
        return q @ jnp.swapaxes(k, 1, 2)

    spec = P(None, "dp")
    return sharded(mesh, body, (spec, spec), spec), (SEQUENCE, SEQUENCE[:, ::-1])


@mistake(Kind.POSITION)
def causal_mask_of_the_part(mesh):
    def body(q, k):
        k = lax.all_gather(k, "dp", axis=1, tiled=True)
        scores = q @ jnp.swapaxes(k, 1, 2)
        rows = jnp.arange(q.shape[1])  # wrong
        seen = rows[:, None] >= jnp.arange(k.shape[1])[None]
        return jax.nn.softmax(jnp.where(seen, scores, -1e9), -1) @ k

    spec = P(None, "dp")
    return sharded(mesh, body, (spec, spec), spec, check=False), (SEQUENCE, SEQUENCE[:, ::-1])


@mistake(Kind.POSITION)
def positions_of_groups_by_jit(mesh):
    groups = mesh.shape["dp"]

    def body(x):
        parts = x.reshape(2, groups, -1, 8)
        positions = jnp.arange(parts.shape[2])  # wrong
        return (parts + positions[:, None]).reshape(x.shape)

    return jax.jit(body, in_shardings=placed(mesh, P(None, "dp"))), (SEQUENCE,)


# ---------------------------------------------------------------- local statistics


@mistake(Kind.LOCAL_STATISTICS)
def batch_norm_of_the_rank(mesh):
    def norm(x):
        mean = x.mean(0)  # wrong
        centred = x - mean
        return centred / jnp.sqrt((centred**2).mean(0) + 1e-5)

    return sharded(mesh, norm, (DATA,), DATA), (BATCH,)


@mistake(Kind.LOCAL_STATISTICS)
def variance_of_the_rank(mesh):
    def norm(x):
        mean = lax.pmean(x.mean(0), "dp")
        centred = x - mean
        variance = jnp.mean(centred**2, 0)  # wrong
        return centred * lax.rsqrt(variance + 1e-5)

    return sharded(mesh, norm, (DATA,), DATA, check=False), (BATCH,)


@mistake(Kind.LOCAL_STATISTICS)
def rms_of_hidden_parts(mesh):
    def norm(x, scale):
        squares = jnp.mean(x * x, -1, keepdims=True)  # wrong
        return x * lax.rsqrt(squares + 1e-6) * scale

    spec = P("dp", "tp")
    return sharded(mesh, norm, (spec, P("tp")), spec), (BATCH, normal(8))


@mistake(Kind.LOCAL_STATISTICS)
def groups_norm_by_jit(mesh):
    groups = mesh.shape["dp"]

    def norm(x):
        parts = x.reshape(groups, -1, 8)
        mean = parts.mean(1, keepdims=True)  # wrong
        return ((parts - mean) * 2.0).reshape(x.shape)

    return jax.jit(norm, in_shardings=placed(mesh, DATA)), (BATCH,)


@mistake(Kind.LOCAL_STATISTICS)
def module_batch_norm(mesh):
    layer = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def body(state, x):
        layer = nnx.merge(graph, state)
        return layer(x)  # wrong

    return sharded(mesh, body, (P(), DATA), DATA, check=False), (state, BATCH)


# ---------------------------------------------------------------- local norm


@mistake(Kind.LOCAL_NORM)
def clip_by_the_norm_of_the_shard(mesh):
    def clip(g):
        norm = jnp.sqrt(jnp.sum(g * g))  # wrong
        return g * jnp.minimum(1.0, 1.0 / norm)

    return sharded(mesh, clip, (DATA,), DATA), (BATCH,)


@mistake(Kind.LOCAL_NORM)
def clip_a_tree(mesh):
    def clip(grads):
        squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads))  # wrong
        scale = jnp.minimum(1.0, 0.5 / jnp.sqrt(squares))
        return jax.tree.map(lambda g: g * scale, grads)

    return sharded(mesh, clip, (P("dp"),), P("dp"), check=False), (WEIGHTS,)


@mistake(Kind.LOCAL_NORM)
def clip_by_optax(mesh):
    clip = optax.clip_by_global_norm(0.5)

    def step(grads):
        clipped, _ = clip.update(grads, clip.init(grads))  # wrong
        return clipped

    return sharded(mesh, step, (P("tp"),), P("tp"), check=False), (WEIGHTS,)


@mistake(Kind.LOCAL_NORM)
def norms_of_rows(mesh):
    def normalise(x):
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)  # wrong
        return x / length

    spec = P("dp", "tp")
    return sharded(mesh, normalise, (spec,), spec), (BATCH,)


@mistake(Kind.LOCAL_NORM)
def norm_of_groups_by_jit(mesh):
    groups = mesh.shape["dp"]

    def clip(g):
        parts = g.reshape(groups, -1)
        norms = jnp.sqrt((parts**2).sum(1, keepdims=True))  # wrong
        return (parts / norms).reshape(g.shape)

    return jax.jit(clip, in_shardings=placed(mesh, DATA)), (BATCH,)


# ---------------------------------------------------------------- gather order


@mistake(Kind.GATHER_ORDER)
def gathers_in_the_other_order(mesh):
    def body(x):
        x = lax.all_gather(x, "dp", axis=0, tiled=True)  # wrong
        return lax.all_gather(x, "tp", axis=0, tiled=True)  # wrong

    return sharded(mesh, body, (P(("dp", "tp")),), P(), check=False), (BATCH,)


@mistake(Kind.GATHER_ORDER)
def gathers_of_one_name_list(mesh):
    weights = normal(8, 16)

    def body(w, x):
        full = lax.all_gather(w, ("tp", "dp"), axis=0, tiled=True)  # wrong
        return x @ full

    ins = (P(("dp", "tp")), DATA)
    return sharded(mesh, body, ins, DATA, check=False), (weights, BATCH)


@mistake(Kind.GATHER_ORDER)
def ring_in_the_wrong_direction(mesh):
    size = mesh.shape["dp"]

    def body(x):
        pairs = [(rank, (rank + 1) % size) for rank in range(size)]
        first = lax.ppermute(x, "dp", pairs)  # wrong
        return first

    return sharded(mesh, body, (DATA,), DATA), (BATCH,)


@mistake(Kind.GATHER_ORDER)
def groups_transposed_by_jit(mesh):
    groups = mesh.shape["dp"]

    def body(x):
        parts = x.reshape(groups, -1, 8)
        rows = jnp.swapaxes(parts, 0, 1)  # wrong
        return rows.reshape(x.shape) * 2.0  # wrong

    return jax.jit(body, in_shardings=placed(mesh, DATA)), (BATCH,)


@mistake(Kind.GATHER_ORDER)
def sequence_gathered_in_the_batch(mesh):
    def body(x):
        parts = lax.all_gather(x, "dp", axis=0)
        return parts.reshape(2, -1, 8)  # wrong

    return sharded(mesh, body, (P(None, "dp"),), P(), check=False), (SEQUENCE,)


# ---------------------------------------------------------------- local argmax


@mistake(Kind.LOCAL_ARGMAX)
def argmax_of_the_part(mesh):
    def predict(scores):
        best = jnp.argmax(scores, -1)  # wrong
        return lax.pmax(best, "tp")

    return sharded(mesh, predict, (P("dp", "tp"),), DATA), (BATCH,)


@mistake(Kind.LOCAL_ARGMAX)
def accuracy_of_the_part(mesh):
    labels = BATCH.argmax(-1).astype(np.int32)

    def accuracy(x, w, labels):
        scores = x @ w
        guess = scores.argmax(-1)  # wrong
        hits = jnp.mean((guess == labels).astype(jnp.float32))
        return lax.pmean(hits, ("dp", "tp"))

    ins = (DATA, P(None, "tp"), DATA)
    args = (BATCH, np.eye(8, dtype=np.float32), labels)
    return sharded(mesh, accuracy, ins, P(), check=False), args


@mistake(Kind.LOCAL_ARGMAX)
def top_k_of_the_part(mesh):
    def route(x):
        _, experts = lax.top_k(x, 2)  # wrong
        return lax.pmax(experts, "tp")

    return sharded(mesh, route, (P("dp", "tp"),), DATA), (BATCH,)


@mistake(Kind.LOCAL_ARGMAX)
def argmax_of_groups_by_jit(mesh):
    parts = mesh.shape["tp"]

    def predict(scores):
        split = scores.reshape(16, parts, -1)
        best = split.argmax(-1)  # wrong
        return best.max(1)

    return jax.jit(predict, in_shardings=placed(mesh, P("dp", "tp"))), (BATCH,)


@mistake(Kind.LOCAL_ARGMAX)
def worst_sample_of_the_rank(mesh):
    def worst(w, x, y):
        losses = jnp.sum((net(w, x) - y) ** 2, -1)
        at = jnp.argmax(losses)  # wrong
        return lax.pmin(at, "dp")

    return sharded(mesh, worst, (P(), DATA, DATA), P(), check=False), (WEIGHTS, BATCH, TARGETS)


# ---------------------------------------------------------------- local softmax


@mistake(Kind.LOCAL_SOFTMAX)
def softmax_of_the_part(mesh):
    def body(scores):
        return jax.nn.softmax(scores, -1)  # wrong

    spec = P("dp", "tp")
    return sharded(mesh, body, (spec,), spec), (BATCH,)


@mistake(Kind.LOCAL_SOFTMAX)
def sum_of_exponents_of_the_part(mesh):
    def body(scores):
        most = lax.pmax(lax.stop_gradient(scores.max(-1, keepdims=True)), "tp")
        exps = jnp.exp(scores - most)
        total = exps.sum(-1, keepdims=True)  # wrong
        return exps / total

    spec = P("dp", "tp")
    return sharded(mesh, body, (spec,), spec, check=False), (BATCH,)


@mistake(Kind.LOCAL_SOFTMAX)
def maximum_of_the_part(mesh):
    def body(scores):
        most = scores.max(-1, keepdims=True)  # wrong
        exps = jnp.exp(scores - most)
        return exps / lax.psum(exps.sum(-1, keepdims=True), "tp")

    spec = P("dp", "tp")
    return sharded(mesh, body, (spec,), spec), (BATCH,)


@mistake(Kind.LOCAL_SOFTMAX)
def cross_entropy_of_the_part(mesh):
    labels = (np.arange(16) % 8).astype(np.int32)

    def loss(x, w, labels):
        scores = x @ w
        most = lax.pmax(lax.stop_gradient(scores.max(-1)), "tp")
        norm = most + jnp.log(jnp.exp(scores - most[:, None]).sum(-1))  # wrong
        at = labels - lax.axis_index("tp") * scores.shape[1]
        hit = (at[:, None] == jnp.arange(scores.shape[1])[None]).astype(scores.dtype)
        picked = lax.psum((hit * scores).sum(-1), "tp")
        return lax.pmean((norm - picked).mean(), ("dp", "tp"))

    ins = (DATA, P(None, "tp"), DATA)
    return sharded(mesh, loss, ins, P()), (BATCH, WEIGHTS["up"], labels)


@mistake(Kind.LOCAL_SOFTMAX)
def softmax_of_groups_by_jit(mesh):
    parts = mesh.shape["tp"]

    def attend(scores):
        split = scores.reshape(16, parts, -1)
        return jax.nn.softmax(split, -1).reshape(scores.shape)  # wrong

    return jax.jit(attend, in_shardings=placed(mesh, P("dp", "tp"))), (BATCH,)
