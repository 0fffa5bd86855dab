"""Whether the tests notice: one small fault at a time, in a copy of the tree.

    python -m benchmarks.mutations [--jobs 2] [--only TEXT]

A row names a file, an exact text in it, the fault that takes its place, and the quick tests that
should fail then. The tests run on the copy without a fault first. A fault counts as killed where
tests fail; where they cannot be collected, crash or hang, nobody has noticed anything.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("axon_dist", "benchmarks", "tests", "conftest.py", "pyproject.toml")
LIMIT = 600
"""Seconds; far more than any row takes."""
PASSED, FAILED = 0, 1
"""The return codes of pytest if tests have run."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault, and who should notice it.

    Args:
        file: within `axon_dist`.
        text: what it says now, exactly once.
        fault: what it says then.
        tests: what to run, within `tests`: files or single tests.
    """

    file: str
    text: str
    fault: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The source with the fault.

        Raises:
            ValueError: when the text is not there exactly once.
        """
        count = source.count(self.text)
        if count != 1:
            raise ValueError(
                f"axon_dist/{self.file} has {self.text!r} {count} times; a row needs it once: "
                "write down what the line says now, or a longer text"
            )
        return source.replace(self.text, self.fault)


def row(file: str, text: str, fault: str, *tests: str) -> Mutation:
    """A row of the table."""
    return Mutation(file, text, fault, tests)


MUTATIONS = (
    # A step: weights, microbatches, clipping, what is not finite.
    row(
        "step/update.py", "nonfinite |= ~jnp.isfinite(loss)", "pass",
        "step/test_update.py::test_a_loss_or_a_gradient_alone_undoes_a_step",
    ),
    row(
        "ops/precision.py", "max_norm / (norm + _EPSILON)", "max_norm / (norm**2 + _EPSILON)",
        "step/test_update.py::test_long_gradients_are_scaled_down_to_the_limit",
    ),
    row(
        "step/objective.py", "jnp.where(pair.weight == 0, 0, pair.total * pair.weight)",
        "pair.total * pair.weight",
        "step/test_objective.py",
    ),
    row(
        "step/objective.py", "else grad * factor.astype(grad.dtype)", "else grad",
        "step/test_objective.py",
    ),
    row(
        "step/microbatches.py", "scan(body, (zeros, buffers), (batch, numbers))",
        "scan(body, (zeros, buffers), (batch, numbers), reverse=True)",
        "step/test_accumulate.py",
    ),
    row(
        "step/batch.py", "part.reshape(count, part.shape[0] // count, *part.shape[1:])",
        "part.reshape(part.shape[0] // count, count, *part.shape[1:]).swapaxes(0, 1)",
        "step/test_batch.py",
    ),
    row(
        "step/batch.py", "numpy.zeros_like(leaf[-1:]) if is_weight else leaf[-1:]", "leaf[-1:]",
        "step/test_padding.py::test_own_weights_stay_and_fillings_weigh_nothing",
    ),
    row(
        "ops/precision.py", "wide(jnp.asarray(g)) / state.scale",
        "wide(jnp.asarray(g)) * state.scale",
        "ops/test_scaler.py::test_scale_and_unscale",
    ),
    row(
        "ops/precision.py", "state.good_steps + 1 >= self", "state.good_steps >= self",
        "ops/test_scaler.py",
    ),
    # Collectives: the scale of a mean, slices, buckets.
    row(
        "collectives/reduce.py", "group), group.axes) / group.size", "group), group.axes)",
        "collectives/test_reduce.py::test_mean_of_vectors",
    ),
    row(
        "collectives/move.py", "position(group) * size, size, dim", "position(group), size, dim",
        "collectives/test_move.py::test_scatter_gives_slices_in_the_order_of_a_list",
    ),
    row(
        "collectives/buckets.py", "+ sizes[index] > capacity", "+ sizes[index] >= capacity",
        "collectives/test_plan.py",
    ),
    row(
        "collectives/move.py", "if wrap or 0 <= dst < size", "if wrap or 0 <= dst <= size",
        "collectives/test_point.py::test_shift",
    ),
    row(
        "mesh/group.py", "transpose(rest + dims)", "transpose(dims + rest)",
        "mesh/test_group.py::test_parallel_groups_of_three_axes",
    ),
    row(
        "mesh/world.py", "ranks * mesh.shape[axis] +", "ranks +",
        "mesh/test_shares.py",
    ),
    # Shards: which dim, how many, whose rows.
    row(
        "sharding/policy.py", "(d in tiled, shape[d], -d)", "(tiled(d), -shape[d], -d)",
        "sharding/test_policy.py",
    ),
    row(
        "sharding/policy.py", "// count % TILE == 0", "% TILE == 0",
        "sharding/test_policy.py",
    ),
    row(
        "sharding/apply.py", "-(-self.numel // self.num_shards)",
        "self.numel // self.num_shards + 1",
        "sharding/test_geometry.py",
    ),
    row(
        "nn/linear.py", "axis_index(axis) * size, size, axis=-1", "axis_index(axis), size, axis=-1",
        "nn/test_linear.py::test_both_views_equal_the_dense_product",
    ),
    row(
        "ops/linear_loss.py", "axis_index(axes) * classes", "axis_index(axes)",
        "parallel/test_losses.py::test_equals_the_dense_loss_and_reduces_the_head_once",
    ),
    row(
        "ops/linear_loss.py", "d_logits * at.weights[:, None]", "d_logits",
        "nn/test_linear_loss.py::test_value_and_gradients_equal_those_of_all_logits",
    ),
    row(
        "separability/rules.py", "result = times(losses, as_rows(weights, op.inputs[3]))",
        "result = losses",
        "separability/test_samples.py::test_the_weights_of_a_loss_without_logits_are_seen",
    ),
    # A pipeline: weights of metrics, scale, rows of stages, what crosses a cut.
    row(
        "step/storage.py", "_flat(shard_metrics(outcome, num_parts))", "_flat(outcome.metrics)",
        "contracts/test_pipelines.py",
    ),
    row(
        "pipeline/executor.py", "else loss.total * self.scale", "else loss.total",
        "pipeline/test_executor.py::test_the_scale_acts_on_gradients_alone",
    ),
    row(
        "pipeline/uniform.py", "starts[stage] + row", "starts[stage]",
        "pipeline/test_uniform.py::test_stages_one_after_another_are_the_loss[mixed-two_ranks]",
    ),
    row(
        "pipeline/switch.py", "level < stage <= read_at", "level < stage < read_at",
        "pipeline/test_switch.py::test_stages_one_after_another_are_the_loss[busy-v]",
    ),
    row(
        "pipeline/loss_trace.py", "then, [now[i]", "then, [then[i]",
        "pipeline/test_loss_trace.py::test_buffers_before_every_microbatch_and_after_the_last",
    ),
    # What stages keep from microbatch to microbatch, and what ranks ask each other about experts.
    row(
        "pipeline/executor.py", 'put(new[i], entry["microbatch"] + 1, value',
        'put(new[i], entry["microbatch"], value',
        "pipeline/test_executor.py::test_stages_keep_what_a_microbatch_has_left_for_the_next",
    ),
    row(
        "parallel/expert.py", "return all_sum(total, self.axes), samples", "return total, samples",
        "contracts/test_expert_pipelines.py::test_equals_one_device",
    ),
    row(
        "step/pipeline_view.py", "batch_axes if axis not in spec_axes(row))", "batch_axes)",
        "contracts/test_expert_pipelines.py::test_equals_one_device",
    ),
    # Schedules: what must come first, how long a slot is taken, how far ahead forwards run.
    row(
        "schedule/validate.py", "user.tick <= made.tick", "user.tick < made.tick",
        "schedule/test_validate.py::test_mistakes_are_reported_and_marked",
    ),
    row(
        "schedule/memory.py", "source = places[dependencies(action",
        "source = user or places[dependencies(action",
        "schedule/test_slots.py::test_no_value_is_overwritten",
    ),
    row(
        "schedule/builders.py", "ahead=num_stages - s)", "ahead=num_stages - s + 1)",
        "schedule/test_builders.py::test_the_order_of_1f1b",
    ),
    # Random draws and the order of the data.
    row(
        "ir/randomness.py", "jnp.int32) * shape[sampled.dim]\n        if",
        "jnp.int32)\n        if",
        "ir/test_randomness.py::test_rows_of_the_global_draw",
    ),
    row(
        "data/samples.py", ".seed(seed)", ".seed(0)",
        "data/test_sampling.py::test_epochs_and_seeds_have_orders_of_their_own",
    ),
    row(
        "data/loader.py", "self._samples_seen += self.global_batch", "self._samples_seen += 1",
        "data/test_loader.py::test_resuming_repeats_none_and_skips_none",
    ),
    # Checkpoints: what is checked before anything is restored, and what may go.
    row(
        "checkpoint/seal.py", "if crc != record.crc32", "if False",
        "checkpoint/test_save_load.py::test_every_damage_is_noticed_and_the_file_named",
    ),
    row(
        "checkpoint/seal.py", "if marker != marker_of(text)", "if not marker",
        "checkpoint/test_save_load.py::test_every_damage_is_noticed_and_the_file_named",
    ),
    row(
        "checkpoint/seal.py", "shape[dim + 1 :]", "shape[dim:]",
        "checkpoint/test_checksum.py::test_the_formula",
    ),
    row(
        "checkpoint/host_copies.py",
        "order[order.index(self.hosts[process]) - 1]", "self.hosts[process]",
        "checkpoint/test_host_copies.py",
    ),
    row(
        "checkpoint/host_copies.py", "pairs = [(source, n)", "pairs = [(n, source)",
        "checkpoint/test_host_copies.py",
    ),
    row(
        "checkpoint/copy_files.py", "if finished.issuperset(writers)", "if finished",
        "checkpoint/test_host_copies.py",
    ),
    row(
        "checkpoint/manager.py", "by_age[-self.last :]", "by_age[: self.last]",
        "checkpoint/test_retention.py",
    ),
    # Starting processes.
    row(
        "launch/environment.py", "str(port + is_in_use)", "str(port)",
        "launch/test_environment.py::test_the_port_of_torchruns_own_store_is_left_to_it",
    ),
    row(
        "launch/environment.py", "return sorted(hosts)", "return hosts",
        "launch/test_environment.py",
    ),
    # What `inspect` reads from a program, and what the planner predicts for one.
    row(
        "inspect/computations.py", "return iteration\n", "return iteration + 1\n",
        "inspect/test_loops.py",
    ),
    row(
        "mesh/group.py", "iota.transpose(order or range(len(dims)))", "iota",
        "inspect/test_groups.py::test_every_notation_becomes_lists_of_devices",
    ),
    row(
        "inspect/ledger.py", "2 if kind == \"all-reduce\" else 1", "1",
        "inspect/test_ledger.py::test_ring_costs",
    ),
    row(
        "planner/reading.py", "(1 - 1 / self._ranks(sent))", "1.0",
        "planner/test_reading.py::test_a_reading_is_near_the_compiled_step",
    ),
    # Blocks of bridged models: one program for equal ones, their own weights, their names.
    row(
        "ir/units.py", "if same_program(program, other):",
        "if not same_program(program, other):",
        "ir/test_linen.py",
    ),
    row(
        "ir/linen.py", "remaining.append(equation)", "remaining.append(equation), known.clear()",
        "ir/test_linen.py::test_equal_blocks_have_one_program_and_are_a_chain",
    ),
    row(
        "ir/linen.py", 'self.gathers.get("/".join(filter(None, (path, *names))))', "None",
        "ir/test_linen.py::test_a_unit_gathers_its_own_parameters_and_no_other",
    ),
    row(
        "step/storage.py", 're.sub("(?i)decoder", "encoder~", str(key))', "str(key)",
        "step/test_blocks.py",
    ),
    row(
        "parallel/tensor.py", "if any(context.module is layer for layer in pinned):", "if False:",
        "parallel/test_lookups.py",
    ),
    row(
        "parallel/tensor.py", "not in LOOKUPS or", "is None or",
        "parallel/test_lookups.py",
    ),
)  # fmt: skip


def copy_of(root: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what tests need."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def run_tests(tree: pathlib.Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Runs tests of a tree on its own code; returns pytest's code, None for a hang, and its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    names = [f"tests/{name}" for name in tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *names], cwd=tree, env=environment, capture_output=True, text=True,
            timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no end after {LIMIT} seconds"
    return done.returncode, done.stdout[-2000:] + done.stderr[-1000:]


def outcome_of(mutation: Mutation, root: pathlib.Path = ROOT) -> tuple[str, str]:
    """Puts the fault into a copy and runs the tests; returns what came of it, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        copy_of(root, tree)
        file = tree / "axon_dist" / mutation.file
        file.write_text(mutation.applied(file.read_text()))
        code, output = run_tests(tree, mutation.tests)
    return {PASSED: "SURVIVED", FAILED: "killed", None: "HUNG"}.get(
        code, f"BROKEN ({code})"
    ), output


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where a fault was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="rows at the same time")
    parser.add_argument("--only", default="", help="rows whose file or text has this in it")
    options = parser.parse_args(argv)
    rows = [m for m in MUTATIONS if options.only in m.file or options.only in m.text]
    for mutation in rows:
        mutation.applied((ROOT / "axon_dist" / mutation.file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy_of(ROOT, pathlib.Path(folder))
        tests = sorted({name for mutation in rows for name in mutation.tests})
        code, output = run_tests(pathlib.Path(folder), tests)
    if code != PASSED:
        print(f"without any fault the tests end with {code}:\n{output}")
        return 1
    started, survivors = time.perf_counter(), 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for mutation, (outcome, output) in zip(rows, pool.map(outcome_of, rows), strict=True):
            fault = " ".join(mutation.fault.split())
            print(f"{outcome:9} {mutation.file:24} {fault}", flush=True)
            if outcome != "killed":
                survivors += 1
                print(output)
    seconds = time.perf_counter() - started
    print(f"{len(rows) - survivors} of {len(rows)} killed, in {seconds:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
