"""Further mistakes as trainers of language models make them, each with a right program like it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axon_dist.prove import Kind

from .parts import (
    BATCH,
    DATA,
    KEY,
    LABELS,
    MASK,
    SEQUENCE,
    TARGETS,
    TOKEN_MASK,
    TOKENS,
    WEIGHTS,
    net,
    normal,
    sharded,
    squared,
)

WRONG = {}
RIGHT = {}
SPLIT = P(None, "dp")
SQUARE = 0.3 * normal(8, 8)
HEADS = normal(2, 16, 16, 4)
UP, DOWN = WEIGHTS["up"], WEIGHTS["down"]


def pair(kind):
    """Registers a program that is wrong for `is_wrong=True`, and right for False."""

    def add(make):
        WRONG[make.__name__] = (kind, functools.partial(_made, make, True))
        RIGHT[make.__name__] = functools.partial(_made, make, False)
        return make

    return add


def _made(make, is_wrong, mesh):
    return make(mesh, is_wrong)


@pair(Kind.NOT_REDUCED)
def column_parallel_without_its_backward_sum(mesh, is_wrong):
    """Megatron's f: the identity forward, and the sum of the ranks' cotangents backward."""

    @jax.custom_vjp
    def enter(x):
        return x

    def backward(_, cotangent):
        return (cotangent if is_wrong else lax.psum(cotangent, "tp"),)

    enter.defvjp(lambda x: (x, None), backward)

    @jax.custom_vjp
    def leave(x):
        return lax.psum(x, "tp")

    leave.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, cotangent: (cotangent,))

    def step(first, up, down, x):
        def loss(first):
            hidden = jnp.tanh(enter(x @ first) @ up)  # wrong
            return jnp.mean(leave(hidden @ down) ** 2)

        return jax.grad(loss)(first)  # wrong

    ins = (P(), P(None, "tp"), P("tp"), P())
    return sharded(mesh, step, ins, P(), check=False), (SQUARE, UP, DOWN, BATCH)


@pair(Kind.SUMMED_BY_GRAD)
def row_parallel_with_the_transposed_sum(mesh, is_wrong):
    """JAX transposes an unchecked psum to a psum, so the cotangents count once for each rank."""

    @jax.custom_vjp
    def leave(x):
        return lax.psum(x, "tp")

    leave.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, cotangent: (cotangent,))

    def step(up, down, x):
        def loss(down):
            out = jnp.tanh(x @ up) @ down
            out = lax.psum(out, "tp") if is_wrong else leave(out)  # wrong
            return jnp.mean(out**2)

        return jax.grad(loss)(down)  # wrong

    ins = (P(None, "tp"), P("tp"), P())
    return sharded(mesh, step, ins, P("tp"), check=False), (UP, DOWN, BATCH)


@pair(Kind.SUMMED_BY_GRAD)
def vocabulary_split_over_the_ranks(mesh, is_wrong):
    """The indices of a rank's own labels have no counterpart on one device, and are right."""

    @jax.custom_vjp
    def leave(x):
        return lax.psum(x, "tp")

    leave.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, cotangent: (cotangent,))

    def step(head, x, labels):
        def loss(head):
            logits = x @ head
            ids = labels - lax.axis_index("tp") * head.shape[1]
            inside = (ids >= 0) & (ids < head.shape[1])
            picked = jnp.take_along_axis(logits, jnp.where(inside, ids, 0)[:, None], 1)[:, 0]
            total = jnp.exp(logits).sum(-1)
            total = lax.psum(total, "tp") if is_wrong else leave(total)  # wrong
            return jnp.mean(jnp.log(total) - leave(picked * inside))

        return jax.grad(loss)(head)

    labels = np.arange(len(BATCH), dtype=np.int32) % UP.shape[1]
    ins = (P(None, "tp"), P(), P())
    return sharded(mesh, step, ins, P(None, "tp"), check=False), (UP, BATCH, labels)


@pair(Kind.GATHER_ORDER)
def heads_sent_back_along_swapped_dims(mesh, is_wrong):
    back = {"split_axis": 1, "concat_axis": 2}
    if is_wrong:
        back = {"split_axis": 2, "concat_axis": 1}

    def attend(q, k, v):
        def to_heads(a):
            return lax.all_to_all(a, "dp", split_axis=2, concat_axis=1, tiled=True)

        shape = q.shape
        q, k, v = to_heads(q), to_heads(k), to_heads(v)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        out = lax.all_to_all(out, "dp", **back, tiled=True)  # wrong
        return out.reshape(shape)  # wrong

    run = sharded(mesh, attend, (SPLIT,) * 3, SPLIT, check=False)
    return run, (HEADS, 0.5 * HEADS, HEADS[::-1])


@pair(Kind.GATHER_ORDER)
def expert_results_not_transposed(mesh, is_wrong):
    experts, tokens = 0.4 * normal(4, 8, 8), normal(16, 4, 8)

    def body(experts, x):
        sent = lax.all_to_all(x, "dp", split_axis=1, concat_axis=0, tiled=True)
        out = jnp.einsum("tec,ecd->ted", sent, experts)
        if is_wrong:
            out = lax.all_to_all(out, "dp", split_axis=0, concat_axis=0, tiled=True)
            return out.reshape(x.shape)  # wrong
        return lax.all_to_all(out, "dp", split_axis=0, concat_axis=1, tiled=True)

    return sharded(mesh, body, (DATA, DATA), DATA, check=False), (experts, tokens)


@pair(Kind.GATHER_ORDER)
def ring_with_a_missing_pair(mesh, is_wrong):
    size = mesh.shape["dp"]
    count = size - 1 if is_wrong and size > 1 else size

    def attend(q, k):
        total = jnp.zeros(q.shape[:2], q.dtype)
        pairs = [(rank, (rank + 1) % size) for rank in range(count)]
        for _ in range(size):
            total = total + jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) / 8).sum(-1)
            k = lax.ppermute(k, "dp", pairs)  # wrong
        return total

    return sharded(mesh, attend, (SPLIT, SPLIT), SPLIT, check=False), (SEQUENCE, SEQUENCE)


@pair(Kind.ONE_KEY)
def dropout_folded_with_the_other_axis(mesh, is_wrong):
    def body(key, x):
        key = jax.random.fold_in(key, lax.axis_index("tp" if is_wrong else "dp"))
        keep = jax.random.bernoulli(key, 0.5, x.shape)  # wrong
        return jnp.where(keep, x * 2, 0)

    return sharded(mesh, body, (P(), DATA), DATA, check=False), (KEY, BATCH)


@pair(Kind.KEYS_OF_COPIES)
def dropout_of_copies_folded_with_their_rank(mesh, is_wrong):
    def body(key, x):
        key = jax.random.fold_in(key, lax.axis_index("dp"))
        if is_wrong:
            key = jax.random.fold_in(key, lax.axis_index("tp"))
        keep = jax.random.bernoulli(key, 0.5, x.shape)  # wrong
        return jnp.where(keep, x * 2, 0)

    return sharded(mesh, body, (P(), DATA), DATA, check=False), (KEY, BATCH)


@pair(Kind.MEAN_OF_MEANS)
def mean_where_the_mask_is_set(mesh, is_wrong):
    def loss(w, x, y, m):
        errors = jnp.sum((net(w, x) - y) ** 2, -1)
        if is_wrong:
            return lax.pmean(jnp.mean(errors, where=m > 0), "dp")  # wrong
        return lax.psum(jnp.sum(errors, where=m > 0), "dp") / lax.psum((m > 0).sum(), "dp")

    return sharded(mesh, loss, (P(), DATA, DATA, DATA), P()), (WEIGHTS, BATCH, TARGETS, MASK)


@pair(Kind.MEAN_OF_MEANS)
def gradients_by_the_count_of_local_tokens(mesh, is_wrong):
    table = 0.5 * normal(16, 16)

    def step(table, tokens, labels, mask):
        def loss(table):
            scores = table[tokens] @ table
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
            count = mask.sum() if is_wrong else lax.psum(mask.sum(), "dp")
            return (losses * mask).sum() / count  # wrong

        value, grads = jax.value_and_grad(loss)(table)
        reduce = lax.pmean if is_wrong else lax.psum
        return reduce(value, "dp"), table - 0.1 * reduce(grads, "dp")

    run = sharded(mesh, step, (P(), DATA, DATA, DATA), P(), check=False)
    return run, (table, TOKENS, LABELS, TOKEN_MASK)


@pair(Kind.MEAN_OF_MEANS)
def accumulated_means_of_microbatches(mesh, is_wrong):
    rows = np.concatenate([np.ones(5), np.zeros(3), np.ones(2), np.zeros(6)]).astype(np.float32)

    def step(w, x, y, m):
        def turn(total, part):
            x, y, m = part

            def loss(w):
                errors = jnp.sum((net(w, x) - y) ** 2, -1)
                count = jnp.maximum(m.sum(), 1.0) if is_wrong else 1.0
                return (errors * m).sum() / count  # wrong

            return jax.tree.map(jnp.add, total, jax.grad(loss)(w)), None

        parts = x.reshape(2, -1, 8), y.reshape(2, -1, 4), m.reshape(2, -1)
        total, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, w), parts)
        count = 2 * lax.axis_size("dp") if is_wrong else lax.psum(m.sum(), "dp")
        return jax.tree.map(lambda g: lax.psum(g, "dp") / count, total)

    run = sharded(mesh, step, (P(), DATA, DATA, DATA), P(), check=False)
    return run, (WEIGHTS, BATCH, TARGETS, rows)


@pair(Kind.LOCAL_STATISTICS)
def layer_norm_of_split_features(mesh, is_wrong):
    def norm(x, scale, bias):
        if is_wrong:
            mean = jnp.mean(x, -1, keepdims=True)  # wrong
            variance = jnp.var(x, -1, keepdims=True)  # wrong
        else:
            mean = lax.pmean(jnp.mean(x, -1, keepdims=True), "tp")
            variance = lax.pmean(jnp.mean((x - mean) ** 2, -1, keepdims=True), "tp")
        return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + bias

    spec = P("dp", "tp")
    return sharded(mesh, norm, (spec, P("tp"), P("tp")), spec), (BATCH, normal(8), normal(8))


@pair(Kind.LOCAL_ARGMAX)
def experts_picked_from_a_part_of_the_router(mesh, is_wrong):
    def route(x, router):
        scores = x @ router
        if not is_wrong:
            scores = lax.all_gather(scores, "tp", axis=1, tiled=True)
        weights, chosen = lax.top_k(scores, 1)  # wrong
        hits = jax.nn.one_hot(chosen[:, 0], 8)
        return lax.pmean(hits * weights, "tp")

    return sharded(mesh, route, (DATA, P(None, "tp")), DATA), (BATCH, SQUARE)


@pair(Kind.LOCAL_SCAN)
def running_sum_of_a_part(mesh, is_wrong):
    def body(x):
        sums = jnp.cumsum(x, 1)  # wrong
        if is_wrong:
            return sums
        totals = lax.all_gather(sums[:, -1], "dp")
        before = jnp.arange(totals.shape[0]) < lax.axis_index("dp")
        return sums + (totals * before[:, None, None]).sum(0)[:, None]

    return sharded(mesh, body, (SPLIT,), SPLIT), (SEQUENCE,)


@pair(Kind.LOCAL_SCAN)
def running_maximum_of_a_part(mesh, is_wrong):
    def body(x):
        if is_wrong:
            return lax.cummax(x, axis=1)  # wrong
        whole = lax.cummax(lax.all_gather(x, "dp", axis=1, tiled=True), axis=1)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index("dp") * x.shape[1], x.shape[1], 1)

    return sharded(mesh, body, (SPLIT,), SPLIT, check=False), (SEQUENCE,)


@pair(Kind.LOCAL_SCAN)
def state_of_a_recurrence_that_starts_anew(mesh, is_wrong):
    """A linear recurrence over a split sequence, whose ranks all start from zero."""
    size = mesh.shape["dp"]

    def body(x):
        def turn(state, row):
            state = 0.5 * state + row
            return state, state

        def run(start):
            return lax.scan(turn, start, x.swapaxes(0, 1))

        start = jnp.zeros(x[:, 0].shape, x.dtype)
        for hop in range(0 if is_wrong else size - 1):
            last, _ = run(start)
            pairs = [(rank, rank + 1) for rank in range(size - 1)]
            received = lax.ppermute(last, "dp", pairs)
            start = jnp.where(lax.axis_index("dp") > hop, received, start)
        return run(start)[1].swapaxes(0, 1)  # wrong

    return sharded(mesh, body, (SPLIT,), SPLIT, check=False), (SEQUENCE,)


@pair(Kind.LOCAL_ORDER)
def median_of_a_part(mesh, is_wrong):
    def body(x):
        whole = x if is_wrong else lax.all_gather(x, "dp", axis=0, tiled=True)
        ordered = jnp.sort(whole, 0)  # wrong
        return ordered[ordered.shape[0] // 2]

    return sharded(mesh, body, (DATA,), P(), check=False), (BATCH,)


@pair(Kind.POSITION)
def rows_scattered_into_a_part(mesh, is_wrong):
    def body(table, tokens, updates):
        at = tokens if is_wrong else tokens - lax.axis_index("tp") * table.shape[0]
        at = jnp.where((at >= 0) & (at < table.shape[0]), at, table.shape[0])
        return table.at[at].add(updates, mode="drop")  # wrong

    ins = (P("tp"), P(), P())
    tokens = (np.arange(16) * 5 % 16).astype(np.int32)
    return sharded(mesh, body, ins, P("tp"), check=False), (normal(16, 8), tokens, BATCH)


@pair(Kind.POSITION)
def labels_shifted_within_a_part(mesh, is_wrong):
    size = mesh.shape["dp"]

    def body(scores, tokens):
        if is_wrong:
            labels = jnp.roll(tokens, -1, 1)  # wrong
        else:
            pairs = [(rank, (rank - 1) % size) for rank in range(size)]
            first = lax.ppermute(tokens[:, :1], "dp", pairs)
            labels = jnp.concatenate([tokens[:, 1:], first], 1)
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1)
        return -lax.pmean(picked.mean(), "dp")

    run = sharded(mesh, body, (SPLIT, SPLIT), P(), check=False)
    return run, (SEQUENCE, (np.arange(32).reshape(2, 16) * 3 % 8).astype(np.int32))


@pair(Kind.LOCAL_STATISTICS)
def moving_average_of_a_rank(mesh, is_wrong):
    def body(average, x):
        mean = x.mean(0)  # wrong
        mean = mean if is_wrong else lax.pmean(mean, "dp")
        average = 0.9 * average + 0.1 * mean
        return average, x - average

    return sharded(mesh, body, (P(), DATA), (P(), DATA), check=False), (normal(8), BATCH)


@pair(Kind.SUM_FOR_MEAN)
def scattered_gradients_not_divided(mesh, is_wrong):
    def step(w, x, y):
        full = jax.tree.map(lambda a: lax.all_gather(a, "dp", axis=0, tiled=True), w)
        grads = jax.grad(squared)(full, x, y)
        size = 1 if is_wrong else lax.axis_size("dp")

        def update(p, g):
            mean = lax.psum_scatter(g, "dp", scatter_dimension=0, tiled=True)  # wrong
            return p - 0.1 * mean / size

        return jax.tree.map(update, w, grads)

    return sharded(mesh, step, (DATA,) * 3, DATA, check=False), (WEIGHTS, BATCH, TARGETS)


@pair(Kind.NOT_REDUCED)
def mean_over_one_of_two_axes(mesh, is_wrong):
    def step(w, x, y):
        axes = "dp" if is_wrong else ("dp", "tp")
        grads = jax.grad(squared)(w, x, y)  # wrong
        grads = lax.pmean(grads, axes)  # wrong
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    both = P(("dp", "tp"))
    run = sharded(mesh, step, (P(), both, both), P(), check=False)
    return run, (WEIGHTS, BATCH, TARGETS)


@pair(Kind.LOCAL_SCAN)
def places_in_an_expert_counted_by_rank(mesh, is_wrong):
    """Which tokens exceed the capacity depends on how many came before, on all ranks."""
    routes = (np.arange(16) * 7 % 4).astype(np.int32)

    def body(x, routes):
        hot = jax.nn.one_hot(routes, 4, dtype=jnp.int32)
        place = jnp.cumsum(hot, 0)  # wrong
        if not is_wrong:
            totals = lax.all_gather(place[-1], "dp")
            before = jnp.arange(totals.shape[0]) < lax.axis_index("dp")
            place = place + (totals * before[:, None]).sum(0)
        kept = ((place * hot).max(-1) <= 2)[:, None]
        return jnp.where(kept, x, 0)

    return sharded(mesh, body, (DATA, DATA), DATA, check=False), (BATCH, routes)


@pair(Kind.NOT_REDUCED)
def statistics_kept_by_each_rank(mesh, is_wrong):
    """The layer normalizes by the statistics of all, but stores those of the rank."""

    def body(running, x):
        mean = x.mean(0)  # wrong
        whole = lax.pmean(mean, "dp")
        stored = mean if is_wrong else whole
        return 0.9 * running + 0.1 * stored, x - whole

    return sharded(mesh, body, (P(), DATA), (P(), DATA), check=False), (normal(8), BATCH)


@pair(Kind.BIAS)
def auxiliary_loss_added_on_every_rank(mesh, is_wrong):
    def loss(w, x, y, router):
        extra = 0.01 * jnp.sum(router**2)
        part = jnp.sum((net(w, x) - y) ** 2) / 16
        if is_wrong:
            return lax.psum(part + extra, "dp")  # wrong
        return lax.psum(part, "dp") + extra

    run = sharded(mesh, loss, (P(), DATA, DATA, P()), P())
    return run, (WEIGHTS, BATCH, TARGETS, DOWN)


@pair(Kind.MEAN_OF_MEANS)
def module_loss_of_valid_tokens(mesh, is_wrong):
    graph, state = nnx.split(nnx.Embed(16, 16, rngs=nnx.Rngs(0)))

    def body(state, tokens, labels, mask):
        scores = nnx.merge(graph, state)(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        total, count = jnp.vdot(losses, mask), mask.sum()
        if not is_wrong:
            total, count = lax.psum((total, count), ("dp", "tp"))
        mean = total / jnp.clip(count, 1)  # wrong
        return lax.pmean(mean, ("dp", "tp"))

    both = P(("dp", "tp"))
    run = sharded(mesh, body, (P(), both, both, both), P())
    return run, (state, TOKENS, LABELS, TOKEN_MASK)


@pair(Kind.NOT_REDUCED)
def means_of_the_last_layer(mesh, is_wrong):
    """All turns of the loop are right but the last."""

    def body(x, is_last):
        def turn(x, is_last):
            mean = x.mean(0)  # wrong
            whole = lax.pmean(mean, "dp")
            return x - (jnp.where(is_last, mean, whole) if is_wrong else whole), None

        return lax.scan(turn, x, is_last)[0]

    return sharded(mesh, body, (DATA, P()), DATA, check=False), (BATCH, np.arange(3) == 2)
