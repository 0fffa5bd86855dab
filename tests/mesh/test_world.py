import os
import subprocess
import sys
from unittest import mock

import jax
import pytest
from jax.sharding import AxisType

from axon_dist.core.errors import BackendStartedError, GroupError, MeshError, UnsupportedError
from axon_dist.launch.distributed import prepare_emulation
from axon_dist.mesh import Backend, MeshSpec, World
from axon_dist.mesh import world as world_module


def test_a_world_of_emulated_devices(world):
    assert (world.size, world.backend, world.is_emulated) == (8, Backend.EMULATED, True)
    assert world.spec == MeshSpec(dp=8)
    assert world.default_group.size == 8
    assert (world.process_index, world.num_processes) == (0, 1)


@pytest.mark.parametrize("axes", ["dp=2,tp=4", {"dp": 2, "tp": -1}, MeshSpec(dp=2, tp=4)])
def test_axes_are_laid_out_row_major(axes):
    mesh = World.emulate(8, axes).mesh
    assert [d.id for d in mesh.devices[1]] == [4, 5, 6, 7]
    assert mesh.axis_names == ("dp", "tp")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_fewer_devices_than_there_are():
    assert World.emulate(3).size == 3
    assert World.emulate().size == World.mock().size == len(jax.devices())
    assert World.init("tp=2", jax.devices()[6:]).mesh.devices.ravel()[0].id == 6


def test_groups_come_in_mesh_order(make_world):
    world = make_world("pp=2,tp=2")
    assert world.group("tp", "pp").axes == ("pp", "tp") == world.group().axes
    with pytest.raises(GroupError, match="no axis 'cp'"):
        world.group("cp")


def test_runtime_info(world):
    info = world.runtime_info()
    assert (info["backend"], info["devices"], info["mesh"]) == ("emulated", 8, "dp=8")
    assert info["jax"] == jax.__version__


def test_impossible_worlds():
    with pytest.raises(MeshError, match="dp=3 needs 3 devices and got 8"):
        World.emulate(8, "dp=3")
    with pytest.raises(MeshError, match=r"cannot emulate 0 devices; ask for .* 1 to 1024"):
        World.emulate(0)
    with pytest.raises(MeshError, match="empty list of devices"):
        World.init("dp=1", [])
    with pytest.raises(
        BackendStartedError, match=r"wanted 64 .* already runs with 8\. .*NUM_CPU_DEVICES=64"
    ):
        World.emulate(64)


def test_platforms_without_support():
    class Device:
        platform = "rocm-of-tomorrow"

    with pytest.raises(UnsupportedError, match="'rocm-of-tomorrow' are not supported; use cpu"):
        world_module._backend_of([Device()])


SCRIPT = """
import jax, jax.numpy as jnp, flax.nnx, optax
from axon_dist.mesh import World
world = World.emulate(8, "dp=4,tp=2")
step = world.default_group.spmd(lambda x: jax.lax.pmean(x, world.mesh.axis_names) + 1)
x = jnp.zeros(8)
for _ in range(1500):
    x = step(x)
print(x[0])
"""


@pytest.mark.full
def test_a_loop_that_never_waits_does_not_starve():
    """Eight devices on few cores: XLA's threads would all wait for each other, and it aborts."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip() == "1500.0", run.stderr


@pytest.mark.parametrize(
    ("flagged", "variable", "asked"), [(16, -1, 16), (2, -1, 8), (16, 4, 8), (4, 16, 16)]
)
def test_flags_may_ask_for_more_devices_than_a_world_has(flagged, variable, asked, monkeypatch):
    monkeypatch.setenv("NPROC", "")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={flagged} --xla_dump")
    monkeypatch.setattr("axon_dist.launch.distributed.backend_started", lambda: False)
    monkeypatch.setattr("axon_dist.launch.distributed.EmulatedDevices", mock.Mock())
    with mock.patch("axon_dist.launch.distributed.jax") as fake:
        fake.config = mock.Mock(jax_num_cpu_devices=variable, jax_platforms="cpu")
        fake.distributed.is_initialized.return_value = False
        prepare_emulation(8, reads_flag=True)
        fake.config.update.assert_called_once_with("jax_num_cpu_devices", asked)
        fake.config.update.reset_mock()
        # Without it, as for one of several processes, only the variable counts.
        prepare_emulation(8)
        fake.config.update.assert_called_once_with("jax_num_cpu_devices", max(8, variable))


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [
        {"JAX_NUM_CPU_DEVICES": "4", "NPROC": "8"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_the_environment_may_ask_for_more_devices_than_the_first_world(asked):
    worlds = "World.emulate(1, 'dp=1'); print(World.emulate(4, 'dp=4').size)"
    program = f"from axon_dist import World; {worlds}"
    environment = {**os.environ, **asked}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "4\n", done.stderr


LARGER = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import World, build_train_step, ddp

def trained(world, state=None):
    make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    step = build_train_step(make, optax.sgd(0.1), loss, ddp(), world, batch=batch)
    state = step.init() if state is None else state
    return step, *step(state, batch)

loss = lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2)
batch = {"x": np.ones((8, 8), np.float32)}
one = World.emulate(1)
before = jnp.arange(8.0)
small, state, metrics = trained(one)
four = World.emulate(4)
assert (four.size, jax.device_count(), World.emulate(2).size) == (4, 4, 2)
_, _, again = trained(four)
np.testing.assert_allclose(again["loss"], metrics["loss"], rtol=1e-6)
state, later = small(state, batch)
assert later["loss"] < metrics["loss"]
assert (before + jnp.ones(8)).sum() == 36
print("done")
"""


@pytest.mark.full
def test_a_later_world_may_be_larger():
    run = [sys.executable, "-c", LARGER]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
