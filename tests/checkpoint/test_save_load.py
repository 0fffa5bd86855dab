import enum
import functools
import json
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import (
    CheckpointManager,
    DamagedCheckpointError,
    StateDictType,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    target_of,
)
from axon_dist.checkpoint.layout import described
from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError
from axon_dist.models import MLP
from axon_dist.ops.precision import GradScaler
from axon_dist.parallel import ddp, fsdp, zero
from axon_dist.step import build_train_step

BOTH = pytest.mark.parametrize("type", list(StateDictType))
MESHES = ("dp=8", "dp=4", "dp=2,fsdp=2", "fsdp=1")


@BOTH
@pytest.mark.parametrize("before", ["fsdp=8", "dp=2,fsdp=2"])
def test_any_mesh_to_any_mesh_bit_for_bit(type, before, values, place, bits, make_world, tmp_path):
    save_checkpoint(tmp_path / "c", place(values, make_world(before)), type=type)
    for after in MESHES:
        target = place(values, make_world(after), abstract=True)
        restored = load_checkpoint(tmp_path / "c", target)
        assert bits(restored) == bits(values)
        assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, values)
        where = jax.tree.map(lambda x, t: x.sharding.is_equivalent_to(t.sharding, x.ndim),
                             restored, target)  # fmt: skip
        assert all(jax.tree.leaves(where))


@BOTH
def test_a_checkpoint_from_before_a_field_was_renamed_loads(type, tmp_path):
    outer = {"missing": jnp.arange(3.0), "opt_state": (jnp.full(2, 7.0),)}
    save_checkpoint(tmp_path / "old", {"step": jnp.ones(()), "meeting": outer}, type=type)
    restored = load_checkpoint(tmp_path / "old", {"step": jnp.zeros(()), "outer_state": outer})
    assert restored["outer_state"]["missing"].tolist() == [0.0, 1.0, 2.0]
    assert restored["outer_state"]["opt_state"][0].tolist() == [7.0, 7.0]
    part = load_checkpoint(tmp_path / "old", outer, parts="outer_state")
    assert part["missing"].tolist() == [0.0, 1.0, 2.0]
    # A tree of the user's that has a key of that name keeps it.
    kept = load_checkpoint(tmp_path / "old", {"step": jnp.zeros(()), "meeting": outer})
    assert kept["meeting"]["missing"].tolist() == [0.0, 1.0, 2.0]


def test_a_state_of_a_watched_optimizer_whose_clip_was_in_its_chain_loads(tmp_path):
    old = {"opt_state": {"inner": {"1": {"mu": jnp.arange(3.0)}}, "steps": jnp.ones(())}}
    new = {"opt_state": {"inner": {"0": {"mu": jnp.zeros(3)}}, "steps": jnp.zeros(())}}
    save_checkpoint(tmp_path / "old", old)
    restored = load_checkpoint(tmp_path / "old", new)["opt_state"]
    assert restored["inner"]["0"]["mu"].tolist() == [0.0, 1.0, 2.0]


def test_the_manifest_does_not_depend_on_the_mesh_but_names_it(values, place, make_world, tmp_path):
    manifests = []
    for axes in ("dp=8", "dp=2,tp=2"):
        save_checkpoint(tmp_path / axes, place(values, make_world(axes)), meta={"step": 3})
        manifests.append(read_manifest(tmp_path / axes))
    one, other = manifests
    assert (one.leaves, one.checksums) == (other.leaves, other.checksums)
    assert (one.mesh, other.mesh) == ({"dp": 8}, {"dp": 2, "tp": 2})
    assert one.meta == {"step": 3}
    assert str(one.leaves["nested/0/nan"]) == "float32[24]"
    assert str(one.leaves["key"]) == "key<fry>[8]"
    assert one.versions["jax"] == jax.__version__


@functools.cache
def step_on(world, strategy, optimizer=None):
    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def model():
        return MLP((8, 16, 4), rngs=nnx.Rngs(0))

    tx = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    return build_train_step(model, tx, loss_fn, strategy, world, scaler=GradScaler(1024.0))


def batch():
    x = jax.random.normal(jax.random.key(0), (16, 8))
    return {"x": np.asarray(x), "y": np.ones((16, 4), np.float32)}


@pytest.mark.sample("others0")
@pytest.mark.parametrize(
    "others", [[("fsdp=8", fsdp()), ("dp=2", zero(1))], [("dp=2", zero(1)), ("dp=1", ddp())]]
)
def test_a_train_state_goes_from_one_strategy_to_others(make_world, bits, tmp_path, others):
    step = step_on(make_world("fsdp=8"), fsdp())
    state, _ = step(step.init(), batch())
    save_checkpoint(tmp_path / "c", state)
    was = bits(state)
    expected = bits(step(state, batch())[0].params)
    for axes, strategy in others:
        other = step_on(make_world(axes), strategy)
        target = target_of(other.abstract_state, other.state_shardings)
        restored = load_checkpoint(tmp_path / "c", target)
        assert bits(restored) == was
        following, _ = other(restored, batch())
        if axes == "fsdp=8":
            assert bits(following.params) == expected


def test_another_model_optimizer_or_dtype_is_named(world, tmp_path):
    state = {"params": {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}}
    state["opt_state"] = optax.adam(0.1).init(state["params"])
    path = tmp_path / "c"
    save_checkpoint(path, state)

    def error(**changes):
        with pytest.raises(CheckpointError, match="restore it into the model, optimizer") as info:
            load_checkpoint(path, state | changes)
        assert not isinstance(info.value, DamagedCheckpointError)
        return str(info.value)

    wider = {"w": jnp.ones((4, 3)), "b": jnp.ones(2)}
    assert "params/w is float32[4,2] in the checkpoint and float32[4,3] here" in error(params=wider)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"])
    assert "params/w is float32[4,2] in the checkpoint and bfloat16" in error(params=half)
    sgd = error(opt_state=optax.sgd(0.1).init(state["params"]))
    assert "opt_state/0/count (int32[]) is in the checkpoint and not here" in sgd
    assert "and 2 more" in sgd
    more = {**state["params"], "c": jnp.ones(1)}
    assert "params/c (float32[1]) is here and not in the checkpoint" in error(params=more)


def test_another_kind_of_key(tmp_path):
    save_checkpoint(tmp_path / "c", {"key": jax.random.key(0)})
    with pytest.raises(CheckpointError, match=r"key is key<fry>\[\] in .* and key<rbg>\[\] here"):
        load_checkpoint(tmp_path / "c", {"key": jax.random.key(0, impl="rbg")})


def test_states_that_cannot_be_saved_raise(tmp_path):
    with pytest.raises(CheckpointError, match=r"numpy int64, which JAX would turn .* convert it"):
        save_checkpoint(tmp_path / "c", {"n": np.arange(3)})
    with pytest.raises(CheckpointError, match=r"two leaves .* 'a/b'; rename the key"):
        save_checkpoint(tmp_path / "c", {"a/b": 1, "a": {"b": 2}})
    with pytest.raises(UnsupportedError, match=r"w is int4, .* no name.*SHARDED"):
        save_checkpoint(tmp_path / "c", {"w": jnp.ones(4, jnp.int4)}, type=StateDictType.FULL)
    with pytest.raises(CheckpointError, match=r"leaf w .* without a sharding; .*target_of"):
        load_checkpoint(tmp_path / "c", {"w": jax.ShapeDtypeStruct((), jnp.float32)})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [{"b": "text"}]}, r"leaf a/0/b of the state is of type str; only arrays"),
        ({"a": np.array(["x"])}, r"leaf a of the state is of type ndarray of dtype <U1; .* meta"),
        ({"a": object()}, r"leaf a of the state is of type object; only arrays"),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.float32)},
         r"leaf a of the state is of type ShapeDtypeStruct of dtype float32; only"),
        ({"a": 10**12}, r"leaf a of the state is the number 10{12}: .*; keep it smaller, or set"),
        ({}, r"the state, a dict, has no leaves; give a pytree of at least one array"),
        ({"a": None}, r"the state, a dict, has no leaves"),
    ],
)  # fmt: skip
@BOTH
def test_a_state_that_is_none(type, state, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "c", state, type=type)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"ok": 1, "rate": np.float32(3)}, r"JSON, and 'rate' in it cannot be: .* float32 is not"),
        ({"data": {(1, 2): 3}}, r"JSON, and 'data' in it cannot be: keys must be .*; use dicts"),
        (3, r"meta is of type int; give a mapping that JSON can"),
    ],
)
def test_meta_that_json_does_not_hold(meta, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)}, meta=meta)
    assert os.listdir(tmp_path) == []


def test_the_type_by_name(tmp_path):
    message = (
        r"StateDictType got 'ful', and has no such member\. "
        r"Did you mean 'full'\? Valid: full, sharded\."
    )
    with pytest.raises(ConfigError, match=message):
        save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)}, type="ful")
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(tmp_path, type="ful")
    assert os.listdir(tmp_path) == []
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)}, type="full")
    assert read_manifest(tmp_path / "c").type is StateDictType.FULL


@BOTH
def test_arrays_without_elements_alone(type, tmp_path):
    save_checkpoint(tmp_path / "c", {"w": jnp.zeros((0, 3))}, type=type)
    assert load_checkpoint(tmp_path / "c", {"w": jnp.zeros((0, 3))})["w"].shape == (0, 3)


def test_numbers_become_arrays_and_meta_comes_back(tmp_path):
    save_checkpoint(tmp_path / "c", {"n": 3, "x": 0.5}, meta={"data": {"samples_seen": 12}})
    restored = load_checkpoint(tmp_path / "c", {"n": jnp.int32(0), "x": jnp.float32(0)})
    assert (int(restored["n"]), float(restored["x"])) == (3, 0.5)
    assert read_manifest(tmp_path / "c").meta == {"data": {"samples_seen": 12}}


def test_host_memory_comes_and_goes(world, place, bits, tmp_path):
    values = {"w": jnp.arange(16.0)}
    near = place(values, world)["w"].sharding
    far = near.with_memory_kind("pinned_host")
    for before, after in ((near, far), (far, near)):
        save_checkpoint(tmp_path / "c", {"w": jax.device_put(values["w"], before)})
        target = {"w": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=after)}
        restored = load_checkpoint(tmp_path / "c", target)
        assert restored["w"].sharding == after
        assert bits(restored) == bits(values)


@BOTH
def test_a_second_save_replaces_the_first(type, tmp_path):
    for value in (1.0, 2.0):
        save_checkpoint(tmp_path / "c", {"w": jnp.float32(value)}, type=type)
    assert float(load_checkpoint(tmp_path / "c", {"w": jnp.float32(0)})["w"]) == 2.0
    assert os.listdir(tmp_path) == ["c"]


def entries(folder):
    """Every file below a folder with its contents."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("c", {"c/b.txt": "", "c/a": "", "c/d": "", "c/e": ""},
         r"there is a folder that holds 'a', 'b.txt', 'd', and 1 more, "
         r"which saving would delete; only"),
        ("c", {"c": "notes"}, r"/c' there is a file, .* only an empty folder or an earlier check"),
        ("c", {"c/manifest.json": '{"name": "a web page"}'},
         r"holds 'manifest.json' but no COMMITTED file and no manifest.*/c-checkpoint', or move"),
        ("c", {"c/arrays/mine.npy": ""}, r"a folder that holds 'arrays' but no COMMITTED file"),
        ("c", {"c.tmp/thesis": ""}, r"at '.*/c\.tmp' there is a folder that holds 'thesis'"),
        ("c", {"c.old.tmp/thesis": ""}, r"/c\.old\.tmp' there is a folder that holds 'thesis'"),
        ("c.tmp", {}, r"c\.tmp' cannot be the name of a checkpoint: .* not with \.tmp"),
    ],
)  # fmt: skip
def test_folders_that_are_not_checkpoints_are_not_replaced(name, files, message, tmp_path):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    before = entries(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / name, {"w": jnp.ones(3)})
    assert entries(tmp_path) == before
    assert len(os.listdir(tmp_path)) == len({path.split("/")[0] for path in files})


def test_a_checkpoint_with_something_in_it_or_a_link_to_one_is_not_replaced(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    (tmp_path / "c" / "notes").write_text("")
    with pytest.raises(
        CheckpointError, match=r"/c' there is a checkpoint together with 'notes', whi"
    ):
        save_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"/link' there is a symbolic link"):
        save_checkpoint(tmp_path / "link", {"w": jnp.zeros(3)})
    assert load_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_an_empty_folder_and_every_damaged_checkpoint_are_replaced(tmp_path):
    def save():
        save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
        assert load_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]
        assert os.listdir(tmp_path) == ["c"]

    (tmp_path / "c").mkdir()
    save()
    for lost in ("COMMITTED", "manifest.json"):
        (tmp_path / "c" / lost).unlink()
        save()
    shutil.rmtree(tmp_path / "c" / "arrays")
    (tmp_path / "c" / "manifest.json").write_text("{")
    save()
    # What kills leave: while the store wrote, and before the one that was replaced was removed.
    (tmp_path / "c.tmp" / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copytree(tmp_path / "c", tmp_path / "c.old.tmp")
    save()


def test_no_checkpoint_and_an_unfinished_one(tmp_path):
    target = {"w": jnp.ones(3)}
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '.*none'; name a folder"):
        load_checkpoint(tmp_path / "none", target)
    save_checkpoint(tmp_path / "c", target)
    (tmp_path / "c" / "COMMITTED").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"no COMMITTED file: .*; use another"):
        load_checkpoint(tmp_path / "c", target)


def damages(folder):
    """Every file in turn: removed, cut short, and a byte flipped at three places."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        size = file.stat().st_size
        yield name, lambda path: path.unlink()
        yield name, lambda path: os.truncate(path, path.stat().st_size - 1)
        for position in {0, size // 2, size - 1}:
            yield name, functools.partial(flip, position=position)


def flip(path, position):
    contents = bytearray(path.read_bytes())
    contents[position] ^= 0x20
    path.write_bytes(contents)


@BOTH
def test_every_damage_is_noticed_and_the_file_named(type, values, place, world, tmp_path):
    state = place(values, world)
    save_checkpoint(tmp_path / "good", state, type=type)
    count = 0
    for name, damage in damages(tmp_path / "good"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / name)
        with pytest.raises(DamagedCheckpointError, match=name.name):
            load_checkpoint(tmp_path / "bad", state)
        shutil.rmtree(tmp_path / "bad")
        count += 1
    assert count >= 15


def test_a_value_that_changed_before_it_reached_the_disk_is_noticed(tmp_path, monkeypatch):
    from axon_dist.checkpoint import save

    def corrupted(leaves):
        sums = checksums(leaves)
        return sums | {"w": sums["w"] + 1}

    checksums = save.leaf_checksums
    with monkeypatch.context() as patch:
        patch.setattr(save, "leaf_checksums", corrupted)
        save_checkpoint(tmp_path / "c", {"v": jnp.ones(3), "w": jnp.ones(3)})
    with pytest.raises(
        DamagedCheckpointError, match=r"leaf w has checksum .*; use another checkpoint"
    ):
        load_checkpoint(tmp_path / "c", {"v": jnp.ones(3), "w": jnp.ones(3)})


def test_a_newer_format_asks_for_a_newer_version(tmp_path, monkeypatch):
    from axon_dist.checkpoint import layout

    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    monkeypatch.setattr(layout, "_FORMAT", 0)
    with pytest.raises(CheckpointError, match=r"has format 1, .* up to 0; install axon_dist"):
        load_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})


def test_values_that_the_store_cannot_read(tmp_path, monkeypatch):
    from axon_dist.checkpoint.stores import OrbaxStore

    def refuse(*args):
        raise ValueError("no such codec")

    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    monkeypatch.setattr(OrbaxStore, "restore", refuse)
    with pytest.raises(CheckpointError, match=r"no such codec\. Its files are intact; install"):
        load_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})


def test_replicas_write_slices_of_large_arrays_alone(make_world, tmp_path):
    """Every slice is a program for each device, which small arrays are not worth."""
    values = {"large": np.zeros((2, 2**18), np.float32), "small": np.zeros((2, 8), np.float32)}
    world = make_world("dp=2")
    whole = jax.sharding.NamedSharding(world.mesh, jax.sharding.PartitionSpec())
    save_checkpoint(tmp_path / "c", jax.device_put(values, whole))
    written = (tmp_path / "c" / "arrays" / "array_metadatas" / "process_0").read_text()
    rows = [row["array_metadata"] for row in json.loads(written)["array_metadatas"]]
    shapes = {row["param_name"]: tuple(row["write_shape"]) for row in rows}
    assert shapes == {"large": (1, 2**18), "small": (2, 8)}


@BOTH
def test_a_state_with_numbers_is_its_own_target(type, make_world, tmp_path):
    rows = np.arange(4, dtype=np.float32)
    state = {"epoch": 3, "rate": 0.1, "good": True, "rows": rows, "n": np.int32(7)}
    save_checkpoint(tmp_path / "c", {**state, "w": jnp.ones(3)}, type=type)
    others = {"epoch": 0, "rate": 0.0, "good": False, "rows": 0 * rows, "n": np.int32(0)}
    rate = float(np.float32(0.1))  # JAX keeps 32 bits.
    mesh = make_world("dp=2").mesh
    split = jax.device_put(jnp.zeros(4)[:3], NamedSharding(mesh, PartitionSpec()))
    for w, place in ((jnp.zeros(3), jnp.zeros(()).sharding), (split, split.sharding)):
        restored = load_checkpoint(tmp_path / "c", {**others, "w": w})
        assert restored.pop("w").tolist() == [1, 1, 1]
        found = restored.pop("rows")
        assert isinstance(found, jax.Array)
        assert found.sharding == place
        np.testing.assert_array_equal(found, rows)
        kept = {name: x for name, x in {**state, "rate": rate}.items() if name != "rows"}
        assert restored == kept
        assert all(restored[name].__class__ is x.__class__ for name, x in kept.items())
    with pytest.raises(CheckpointError, match=r"epoch is int32\[\] in .* and float32\[\] here"):
        load_checkpoint(tmp_path / "c", {**others, "epoch": 0.0, "w": jnp.ones(3)})
    with pytest.raises(CheckpointError, match=r"epoch of the target is a str without a sharding"):
        load_checkpoint(tmp_path / "c", {**others, "epoch": "0", "w": jnp.ones(3)})


class Phase(enum.IntEnum):
    WARM = 1


@BOTH
def test_of_a_number_in_a_target_only_the_type_counts(type, tmp_path):
    save_checkpoint(tmp_path / "c", {"seed": 5, "phase": 7}, type=type)
    restored = load_checkpoint(tmp_path / "c", {"seed": 2**40, "phase": Phase.WARM})
    # No member of the enum has the value 7.
    assert restored == {"seed": 5, "phase": 7}
    assert {x.__class__ for x in restored.values()} == {int}


@pytest.mark.parametrize("leaf", [3, np.float32(1), np.zeros(2, np.float32)])
def test_several_processes_place_no_leaf_of_a_target_by_themselves(leaf, make_world, monkeypatch):
    devices = [types.SimpleNamespace(process_index=process) for process in range(2)]
    monkeypatch.setattr("axon_dist.checkpoint.layout.available_devices", lambda: devices)
    kind = leaf.__class__.__name__
    with pytest.raises(CheckpointError, match=rf"leaf n of the target is a {kind} without a shard"):
        described({"n": leaf, "w": jnp.zeros(3)})
    whole = NamedSharding(make_world("dp=2").mesh, PartitionSpec())
    w = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=whole)
    found = described({"n": leaf, "w": w})["n"]
    assert (found.sharding, found.shape) == (whole, np.shape(leaf))
