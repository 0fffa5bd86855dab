import dataclasses

import jax
import pytest

from axon_dist.core.errors import BackendStartedError, ConfigError, MeshError, UnsupportedError
from axon_dist.inspect import target_devices, target_mesh
from axon_dist.mesh import targets as environment
from axon_dist.mesh.chips import HARDWARE
from axon_dist.mesh.targets import (
    missing_compiler,
    parse_target,
    prepare_environment,
    target_options,
)


@pytest.mark.parametrize(
    ("name", "platform", "shape", "num_devices"),
    [
        ("cpu:8", "cpu", (8,), 8),
        ("h100:8", "cuda", (8,), 8),
        ("h100:8x8", "cuda", (8, 8), 64),
        ("a100-40:8", "cuda", (8,), 8),
        ("b200:2x4", "cuda", (2, 4), 8),
        ("v4:2x2x4", "tpu", (2, 2, 4), 16),
        ("v5litepod:4x4", "tpu", (4, 4), 16),
        ("v5p:2x2x2", "tpu", (2, 2, 2), 8),
        ("v5p:4x4x4", "tpu", (4, 4, 4), 64),
        ("v5e:16x16", "tpu", (16, 16), 256),
        ("v6e:16x16", "tpu", (16, 16), 256),
    ],
)
def test_targets_are_read(name, platform, shape, num_devices):
    target = parse_target(name)
    assert (target.platform, target.shape, target.num_devices) == (platform, shape, num_devices)
    assert target.name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:8", r"no target chip 'h10' in 'h10:8'\. Did you mean 'h100'"),
        ("h100", r"cannot read the shape '' of target 'h100'; write it as in h100:8 or h100:8x8"),
        ("h100:8x8x8", "write it as in h100:8"),
        ("h100:eight", "shape 'eight'"),
        ("v5p:2x2", r"shape '2x2' of target 'v5p:2x2'; write it as in v5p:2x2x2"),
        ("v5e:0x4", "shape '0x4'"),
        ("h100:16", "asks for 16 h100 in one node, but at most 8 are wired together.*h100:8x8"),
    ],
)
def test_wrong_targets_name_a_right_one(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_target(name)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("h100:8", None),
        ("v5p:2x2x2", None),
        ("v5p:4x4x4", (True, True, True)),
        ("v4:4x4x4", (True, True, True)),
        ("v4:2x2x4", None),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x4", None),
        ("v5e:4x4", None),
        ("v5e:8x16", (False, True, False)),
        ("v6e:16x16", (True, True, False)),
    ],
)
def test_full_torus_axes_close_into_rings(name, wrap):
    assert parse_target(name).wrap == wrap


def test_a_target_says_how_its_compiler_calls_it():
    assert parse_target("v5litepod:4x4").topology == {"topology_name": "v5e:4x4", "platform": "tpu"}
    # By default a v4 chip is two devices with half of its memory each, as JAX never runs it.
    assert parse_target("v4:2x2x2").topology["chip_config_name"] == "megacore"
    assert parse_target("v5p:4x4x4").topology["wrap"] == (True, True, True)
    assert parse_target("h200:8").topology["topology"] == "1x8x1"
    assert parse_target("b200:2x4").topology["topology"] == "2x4x1"


def test_memory_sizes():
    assert parse_target("h100:8").hbm_bytes == 84978434048
    assert parse_target("cpu:8").hbm_bytes is None
    assert parse_target("cpu:8").machine is None


def test_the_emulated_target_is_the_mesh_of_this_process():
    mesh = target_mesh("cpu:8", "dp=4,tp=-1")
    assert dict(mesh.shape) == {"dp": 4, "tp": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert list(target_devices("cpu:8")) == jax.devices()[:8]


def test_a_mesh_that_does_not_fit_the_target_is_refused_before_it_is_built():
    with pytest.raises(MeshError, match="mesh dp=3 needs 3 devices and got 64"):
        target_mesh("h100:8x8", {"dp": 3})


def test_options_are_per_chip_and_not_shared():
    target_options("h100:8").clear()
    assert len(target_options("h100:8")) == 4
    assert target_options("cpu:8") == {}
    sparse = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"
    assert sparse in target_options("v5p:2x2x2")
    assert sparse not in target_options("v5e:16x16")


@pytest.mark.parametrize("form", ["", "2d_", "3d_"])
def test_gathers_over_any_number_of_dims_of_a_torus_leave_the_compute_units(form):
    name = f"xla_tpu_enable_sparse_core_collective_offload_{form}all_gather"
    assert target_options("v5p:4x4x4")[name] == "true"
    assert name not in target_options("v5e:16x16")


def test_gathers_are_fused_only_where_that_is_right():
    """Anywhere but on v5e libtpu refuses it, since it has computed wrong numbers there."""
    of = lambda row: [name for name, _ in row.options if "async_collective_fusion" in name]
    assert [row.name for row in HARDWARE.values() if of(row)] == ["v5e"]


def test_a_missing_compiler_names_its_extra(monkeypatch):
    monkeypatch.setattr(environment, "_is_installed", lambda module: False)
    with pytest.raises(UnsupportedError, match=r"jax_plugins.xla_cuda13.*pip install .*\[cuda\]'"):
        prepare_environment("h100:8")
    with pytest.raises(UnsupportedError, match=r"'libtpu', which is not.*install .*\[aot\]'"):
        target_mesh("v5p:2x2x2", "fsdp=8")
    assert missing_compiler("cpu:8") is None


@pytest.fixture
def any_platform():
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("any_platform")
def test_cuda_after_the_backend_has_started_without_it(monkeypatch):
    monkeypatch.setattr(environment, "missing_compiler", lambda target: None)
    monkeypatch.setattr(environment, "backend_started", lambda: True)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    with pytest.raises(BackendStartedError, match=r"without the CUDA compiler.*before"):
        prepare_environment("h100:8")


def test_the_environment_that_is_set_already_is_kept(monkeypatch):
    monkeypatch.setattr(environment, "missing_compiler", lambda target: None)
    for name in environment._VARIABLES["tpu"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-16")
    prepare_environment("v5p:2x2x2")
    assert environment.os.environ["TPU_ACCELERATOR_TYPE"] == "v6e-16"
    assert environment.os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_targets_are_values():
    target = parse_target("h100:8")
    assert target == parse_target("h100:8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.chip = "v5p"
