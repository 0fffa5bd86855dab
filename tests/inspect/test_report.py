import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from axon_dist.inspect import report
from axon_dist.mesh.chips import MACHINES


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def compiled(mesh):
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    w = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))).lower(w, x).compile()


def test_three_sources_agree_with_arithmetic(compiled, mesh):
    found = json.loads(report(compiled, mesh).to_json())
    assert found["num_devices"] == 8
    assert found["wire_bytes_by_axis"] == {"dp": 2 * 32 * 16 * 4 * 7 // 8}
    assert found["flops"]["high"] == 2 * 2 * 8 * 32 * 16
    assert found["memory"]["arguments"] == 8 * 32 * 4 + 32 * 16 * 4
    assert (found["machine"], found["fits"]) == (None, None)
    assert found["collectives"][0]["axis"] == "dp"


def test_a_known_machine_tells_whether_the_step_fits(compiled, mesh):
    assert report(compiled, mesh, machine=MACHINES[0]).fits is True


def test_it_prints_as_tables(compiled, mesh):
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(report(compiled, mesh, machine=MACHINES[0]))
    text = capture.get()
    assert str(report(compiled, mesh, machine=MACHINES[0])) == text
    for words in ("memory per device", "collectives per device", "matrix FLOPs", "fits", "over dp"):
        assert words in text


def test_products_of_a_branch_are_a_bound(mesh):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    lowered = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x))
    text = str(report(lowered.lower(x).compile(), mesh))
    assert re.search(r"matrix FLOPs, recomputed ones too\W+at most 1.05M", text)
    assert re.search(r"on the cheapest branches\W+at least 524k", text)


def test_cpu_reports_have_no_exposure_and_fitting_units(compiled, mesh):
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(report(compiled, mesh))
    text = capture.get()
    assert "exposed" not in text
    assert "0.000" not in text
    assert "3.58 kB" in text


def test_cpu_reports_say_that_nothing_is_scattered(compiled, mesh):
    split = NamedSharding(mesh, P("dp"))
    x, w = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split) for _ in range(2))
    grad = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    sharded = jax.jit(grad, out_shardings=split).lower(w, x).compile()
    assert "XLA:CPU's partitioner makes no reduce-scatters" in str(report(sharded, mesh))
    assert "XLA:CPU" not in str(report(compiled, mesh))
