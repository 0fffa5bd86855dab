"""Mistakes are found at their line, and nothing is found in right programs."""

import json
import pathlib
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import ConfigError, MeshError
from axon_dist.core.weighted import Weighted
from axon_dist.parallel import compose, ddp, fsdp, local_sgd, suggest_plan, tensor_parallel, zero
from axon_dist.prove import (
    Kind,
    MeshVariant,
    assert_mesh_invariant,
    bisect,
    prove,
    prove_strategy,
)
from axon_dist.prove.locate import frames_of
from axon_dist.prove.rules import proven_outputs
from axon_dist.prove.trace import subject_of
from axon_dist.train.cli.main import main

from . import further, planted
from .historic import HISTORIC
from .parts import BATCH, DATA, TARGETS, Net, lines_of, sharded
from .right import RIGHT
from .wrong import WRONG

REAL = "dp=4,tp=2"


# One row for each way in which the search judges: a quotient of parts, a gradient, random bits, an
# index of the rank, a dim that is split by jit, and parts in a wrong order.
@pytest.mark.sample(
    "masked_mean_checked", "norm_gradient_not_reduced", "noise_with_one_key",
    "positions_of_the_part", "groups_norm_by_jit", "gathers_of_one_name_list",
)  # fmt: skip
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_at_its_line(name):
    kind, make = WRONG[name]
    report = prove(make, meshes=REAL)
    assert report.mistakes, report
    file, lines = lines_of(make)
    first = report.mistakes[0]
    assert (first.place.file, first.kind) == (file, kind) or name == "clip_by_optax", report
    assert first.place.line in lines, report


PROVEN = {
    "masked_loss": True,
    "mean_loss": True,
    "copies_for_each_sample": True,
    "gradients_by_pmean-unchecked": True,
    "megatron_mlp": True,
    "softmax_over_parts": True,
    "dropout_with_folded_keys": False,
}
"""Programs whose outputs rules prove for every input, and one where they cannot."""


# One row each whose outputs rules prove, whose bits are cut into parts, and whose blocks travel.
@pytest.mark.sample("masked_loss", "dropout_with_folded_keys", "ring_attention_causal")
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_right_program(name):
    report = prove(RIGHT[name], meshes=REAL)
    assert report.ok, report
    assert all(output.status != "unjudged" for output in report.outputs), report
    statuses = {output.status for output in report.outputs}
    if name in PROVEN:
        assert statuses == {"proven" if PROVEN[name] else "tried"}
    if name == "dropout_with_folded_keys":
        # A rank folds its index into the key, which no rule describes.
        assert "axis_index at" in report.summary()


@pytest.mark.full
@pytest.mark.parametrize("name", HISTORIC)
def test_a_mistake_of_history_is_found(name):
    report = prove(HISTORIC[name], meshes=REAL)
    _, lines = lines_of(HISTORIC[name])
    assert report.mistakes, report
    # Of a derivative that is written by hand the line is that of the call of jax.grad.
    places = [place.line for place in report.mistakes[0].places]
    assert places[0] in lines or name == "MaxText PR 4959", report


FOUND_NEARBY = {
    "heads_sent_back_along_swapped_dims",
    "expert_results_not_transposed",
    "ring_with_a_missing_pair",
    "accumulated_means_of_microbatches",
    "state_of_a_recurrence_that_starts_anew",
    "rows_scattered_into_a_part",
    "labels_shifted_within_a_part",
}
"""Further mistakes that are found, but at another line or with another kind than the best one."""


@pytest.mark.sample("running_sum_of_a_part")
@pytest.mark.parametrize("name", further.WRONG)
def test_a_further_mistake_is_found_at_its_line(name):
    kind, make = further.WRONG[name]
    report = prove(make, meshes=REAL)
    assert report.mistakes, report
    first = report.mistakes[0]
    if name not in FOUND_NEARBY:
        assert first.place.line in lines_of(make)[1], report
        assert first.kind is kind, report


@pytest.mark.sample("labels_shifted_within_a_part")
@pytest.mark.parametrize("name", further.RIGHT)
def test_nothing_is_found_in_a_further_right_program(name):
    report = prove(further.RIGHT[name], meshes=REAL)
    assert report.ok, report


def test_a_loop_is_proven_and_the_line_of_its_first_wrong_turn_is_found():
    name = "means_of_the_last_layer"
    report = prove(further.RIGHT[name], meshes="dp=4,tp=1")
    assert [output.status for output in report.outputs] == ["proven"]
    (found,) = prove(further.WRONG[name][1], meshes="dp=4,tp=1").mistakes
    assert found.place.line in lines_of(further.WRONG[name][1])[1]


def test_operations_in_a_loop_of_a_jitted_map_have_their_line(make_world):
    make_world("dp=2")

    def make(mesh):
        def turn(carry, row):
            return jnp.tanh(carry * row), None

        def body(x):
            return lax.scan(turn, x, jnp.ones(3))[0]

        return sharded(mesh, body, (DATA,), DATA), (BATCH,)

    traced = subject_of(make, ()).on({"dp": 2}, None)
    inside = [o for o in traced.program.walk() if o.name in ("mul", "tanh")]
    lines = [frames_of(operation)[0].line for operation in inside]
    start = make.__code__.co_firstlineno
    assert [line - start for line in lines] == [2, 2]
    # JAX writes down the keys of dicts, so a value must not be written with all its operands.
    assert max(len(repr(value)) for value in traced.program.values()) < 20


def test_programs_that_read_other_values_are_not_proven():
    def make(mesh):
        def body(x):
            one, two = 2.0 * x, 2.0 * jnp.abs(x)
            return jnp.tanh(one if mesh.shape["dp"] == 1 else two), one + two

        return sharded(mesh, body, (P(),), P()), (np.arange(4, dtype=np.float32),)

    first, second = prove(make, meshes="dp=2").outputs
    assert (first.status, second.status) == ("tried", "proven")


def test_a_mesh_that_a_function_closes_over_is_replaced(make_world):
    mesh = make_world(REAL).mesh

    @jax.jit
    def loss(x):
        run = jax.shard_map(
            lambda x: lax.psum(x.mean(), "dp"), mesh=mesh, in_specs=DATA, out_specs=P()
        )
        return run(x)

    (found,) = prove(loss, BATCH).mistakes
    assert (found.kind, found.axes, found.mesh) == (Kind.SUM_FOR_MEAN, ("dp",), "dp=4,tp=1")
    assert "^" in str(found)


def test_outputs_of_one_program_are_proven_for_every_input():
    report = prove(RIGHT["train_step_by_jit"], meshes=REAL)
    assert {output.status for output in report.outputs} == {"proven"}


@pytest.mark.sample("masked_mean_checked", "loss_summed")
@pytest.mark.parametrize("name", WRONG)
def test_no_output_of_a_mistake_is_proven(name, make_world):
    make_world("dp=8")
    subject = subject_of(WRONG[name][1], ())
    try:
        one = subject.on({"dp": 1, "tp": 1}, None).program
        other = subject.on({"dp": 4, "tp": 2}, None).program
    except (ValueError, jax.errors.JaxRuntimeError):
        return
    without = proven_outputs(other, one, {"dp": 4, "tp": 2}).values()
    assert list(without).count(None) < len(one.outputs)


def test_a_size_that_is_written_as_a_number_is_said_with_its_line():
    def make(mesh):
        def body(x):
            total = lax.psum(x.mean(), "dp")
            return total / 4  # wrong

        return sharded(mesh, body, (DATA,), P()), (BATCH,)

    report = prove(make, meshes="dp=4")
    (found,) = report.findings
    assert report.exit_code == 2
    assert "mesh size 4" in found.sentence
    assert found.place.line in lines_of(make)[1]


def test_a_mistake_in_the_imaginary_part_of_a_result_is_found():
    def program(reduce):
        def make(mesh):
            def body(x):
                return lax.complex(lax.pmean(x.mean(), "dp"), reduce(x.mean(), "dp"))

            return sharded(mesh, body, (DATA,), P()), (BATCH,)

        return make

    assert_mesh_invariant(program(lax.pmean), meshes="dp=4")
    with pytest.raises(MeshVariant):
        assert_mesh_invariant(program(lax.psum), meshes="dp=4")


def test_a_shape_is_drawn_and_a_wrong_mesh_is_refused(make_world):
    def make(mesh):
        return sharded(mesh, lambda x: lax.pmean(x.mean(), "dp"), (DATA,), P())

    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    assert assert_mesh_invariant(make, shape, meshes="dp=2").draws == 2
    with pytest.raises(MeshError, match="needs 64 devices"):
        prove(make, shape, meshes="dp=64")
    with pytest.raises(MeshError, match="PROVE006"):
        prove(lambda x: x, shape)
    with pytest.raises(ConfigError, match="PROVE004"):
        prove(3, meshes="dp=2")
    with pytest.raises(AssertionError, match="sum for mean") as raised:
        assert_mesh_invariant(WRONG["loss_summed"][1], meshes="dp=2")
    assert isinstance(raised.value, MeshVariant)


PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "tp"))

def body(x):
    return jax.lax.psum(x.mean(), "dp")

loss = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))

def mean(x):
    return loss(x) / mesh.shape["dp"]

def arguments():
    return (np.arange(8, dtype=np.float32),)
"""


def test_the_verbs_print_the_line_and_write_json_and_sarif(tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    written = tmp_path / "found.json", tmp_path / "found.sarif"
    options = ["--json", str(written[0]), "--sarif", str(written[1])]
    assert main(["prove", f"{file}:loss", *options]) == 1
    assert "program.py:7: sum for mean" in capsys.readouterr().out
    (found,) = json.loads(written[0].read_text())["findings"]
    (result,) = json.loads(written[1].read_text())["runs"][0]["results"]
    assert found["code"] == result["ruleId"] == "PROVE103"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 7
    location = result["locations"][0]["physicalLocation"]
    assert set(location) == {"artifactLocation", "region"}
    assert all(number >= 1 for number in location["region"].values())
    assert " " not in location["artifactLocation"]["uri"]
    assert main(["prove", f"{file}:mean"]) == 0
    assert main(["bisect", f"{file}:loss", f"{file}:mean"]) == 1
    # On one device both are equal, so it is the mesh that changes the first.
    assert "program.py:7: the programs part at psum" in (out := capsys.readouterr().out)
    assert "it differs from one device: sum for mean" in out


MADE = (
    PROGRAM
    + """
def make(mesh):
    def run(x):
        return jax.lax.psum(x.sum(), "dp") / mesh.shape["dp"]
    return jax.shard_map(run, mesh=mesh, in_specs=P("dp"), out_specs=P())
"""
)


def test_the_mesh_of_a_is_that_of_b_although_their_file_has_one(tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text(MADE)
    same = [f"{file}:make", f"{file}:make", "--mesh", "dp=2,tp=1"]
    assert main(["bisect", *same]) == 0
    assert main(["bisect", *same, "--other-mesh", "dp=4,tp=2"]) == 1
    first, second = capsys.readouterr().out.split("equal but for rounding")[1].split("\n", 1)
    assert "; A on" not in first
    assert "; A on dp=2,tp=1, B on dp=4,tp=2)" in second


def test_the_mesh_of_one_function_is_that_of_the_other_although_it_has_one(make_world):
    mesh = make_world("dp=4").mesh
    mean = jax.shard_map(
        lambda x: lax.psum(x.sum(), "dp") / mesh.shape["dp"],
        mesh=mesh, in_specs=DATA, out_specs=P(), check_vma=False,
    )  # fmt: skip
    found = bisect(mean, mean, np.ones(8, np.float32), mesh={"dp": 2})
    assert found.titles == ("on dp=2", "on dp=2")
    assert found.ok


def test_a_mesh_that_was_given_for_one_function_is_not_for_another_with_other_axes(make_world):
    of_data, of_rows = make_world("dp=4").mesh, make_world("tp=2").mesh
    means = [
        jax.shard_map(
            lambda x, axis=axis, size=size: lax.psum(x.sum(), axis) / size,
            mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False,
        )
        for mesh, axis, size in ((of_data, "dp", 8.0), (of_rows, "tp", 8.0))
    ]  # fmt: skip
    found = bisect(*means, np.ones(8, np.float32), mesh={"dp": 2})
    assert found.titles == ("on dp=2", "on tp=2")
    assert found.ok
    # A mesh with further axes serves both.
    both = bisect(*means, np.ones(8, np.float32), mesh={"dp": 2, "tp": 4})
    assert both.titles == ("on dp=2,tp=4", "on dp=2,tp=4")


@pytest.mark.parametrize("draws", [0, -1])
def test_fewer_than_one_input_is_refused(draws, tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    words = ["prove", f"{file}:mean", "--shape", "f32[8]", "--draws", str(draws)]
    assert main(words) == 2
    assert f"draws={draws}, an int; give a whole number, at least 1" in capsys.readouterr().err
    make = RIGHT["mean_loss"]
    with pytest.raises(ConfigError, match="at least 1"):
        prove(make, meshes="dp=2", draws=draws)
    with pytest.raises(ConfigError, match="at least 1"):
        assert_mesh_invariant(make, meshes="dp=2", inputs=lambda number: (), draws=draws)


def test_a_comparison_of_no_step_is_refused():
    with pytest.raises(ConfigError, match="steps=0"):
        bisect(jnp.sin, jnp.cos, np.ones(3, np.float32), steps=0)


def test_the_place_of_a_mesh_that_cannot_be_tried_is_in_the_users_file(tmp_path, capsys):
    folder = tmp_path / "axon_dist"
    folder.mkdir()
    file = folder / "program.py"
    file.write_text(PROGRAM.replace("loss = jax.jit(", "loss = ("))
    written = tmp_path / "found.json"
    assert main(["prove", f"{file}:mean", "--mesh", "dp=3,tp=1", "--json", str(written)]) == 2
    assert "program.py:12: cannot be tried [PROVE010]" in capsys.readouterr().out
    (found,) = json.loads(written.read_text())["findings"]
    assert {place["file"] for place in found["places"]} == {str(file)}


@pytest.mark.parametrize(
    "mesh",
    [
        'Mesh(np.array(jax.devices()).reshape(8, 8), ("dp", "tp"))',
        'jax.make_mesh((64, 1), ("dp", "tp"))',
    ],
)
def test_a_file_whose_mesh_has_too_many_devices_is_advised_how_to_give_sizes(
    mesh, tmp_path, capsys
):
    file = tmp_path / "program.py"
    written = 'Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "tp"))'
    assert written in PROGRAM
    file.write_text(PROGRAM.replace(written, mesh))
    count = len(jax.devices())
    assert main(["prove", f"{file}:loss"]) == 2
    said = capsys.readouterr().err
    assert "[PROVE003]" in said
    assert f"JAX has {count} devices here. If that is about the file's mesh, give its sizes" in said
    assert "as in --mesh dp=16" in said


def test_the_plugin_proves_marked_tests(tmp_path, capsys):
    file = tmp_path / "test_program.py"
    file.write_text(
        textwrap.dedent(
            """
            import jax, numpy as np, pytest
            from jax.sharding import PartitionSpec as P

            @pytest.mark.mesh_invariant
            @pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
            def test_loss(mesh, reduce):
                def body(x):
                    return reduce(x.mean(), "dp")
                run = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())
                return run, (np.arange(8, dtype=np.float32),)
            """
        )
    )
    # The entry point of the package brings the plugin.
    options = ["--mesh", "dp=4", "-q", "-c", "/dev/null"]
    found = Outcomes()
    pytest.main([str(file), *options, "--rootdir", str(tmp_path)], plugins=[found])
    assert found.outcomes == ["passed", "failed"]
    shown = capsys.readouterr().out
    assert "sum for mean" in shown
    assert "test_loss[psum]: 1 mistake on dp=4" in shown
    assert "def prove(" not in shown


class Outcomes:
    def __init__(self):
        self.outcomes = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.outcomes.append(report.outcome)


@pytest.mark.sample("norm-0-2")
@pytest.mark.parametrize("plant", planted.PLANTS, ids=lambda plant: "-".join(map(str, plant)))
def test_a_planted_difference_is_located(plant):
    place, layer, step = plant
    # Layers behind that of the difference only cost time.
    parameters = {n: w if n == "embed" else w[: layer + 2] for n, w in planted.PARAMETERS.items()}
    arguments = (planted.COUNT, parameters, planted.TOKENS)
    one, other = planted.train_step(planted.Plant()), planted.train_step(planted.Plant(*plant))
    found = bisect(one, other, *arguments, steps=3)
    assert (found.ok, found.step) == (False, step)
    lines = pathlib.Path(planted.__file__).read_text().splitlines()
    assert any(f'at("{place}"' in lines[p.line - 1] for p in found.places), found
    assert found.time == layer + 1, found
    assert found.runs <= np.log2(found.operations) + 3


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


STRATEGIES = {
    "ddp": (ddp, "dp=4"),
    "fsdp": (fsdp, "fsdp=2"),
    "zero1": (lambda: zero(1), "dp=4"),
    "zero2": (lambda: zero(2), "dp=4"),
    "tensor": (
        lambda: compose(ddp(), tensor_parallel(suggest_plan(Net(nnx.Rngs(0)), BATCH))),
        "dp=2,tp=2",
    ),
}


@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_step_of_a_strategy_is_proven(name):
    strategy, meshes = STRATEGIES[name]
    batch = {"x": BATCH, "y": TARGETS}
    report = prove_strategy(
        lambda: Net(nnx.Rngs(0)), optax.adam(1e-2), loss_fn, strategy, batch, meshes
    )
    assert report.ok, report


def test_the_loss_of_replicas_that_train_on_their_own_is_that_of_one_device():
    weigh = lambda model, batch: Weighted(
        jnp.sum(jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1) * batch["w"]),
        jnp.sum(batch["w"]),
    )
    batch = {"x": BATCH, "y": TARGETS, "w": np.arange(len(BATCH), dtype=np.float32)}
    strategy = lambda: local_sgd("nodes", every=2)
    make = lambda: Net(nnx.Rngs(0))
    report = prove_strategy(make, optax.sgd(1e-2), weigh, strategy, batch, "nodes=2")
    assert report.ok, report
    # The parameters of replicas are several, and are not compared.
    assert [one.name for one in report.outputs if one.status != "unjudged"] == ["output[0]"]
