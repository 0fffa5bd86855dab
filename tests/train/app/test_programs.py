import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from axon_dist.core.compat import keep_executables
from axon_dist.launch.distributed import orders_collectives
from axon_dist.parallel import ddp
from axon_dist.train import build_train_step
from axon_dist.train.app.resume import ProgramStore, keep_programs

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def untold(monkeypatch, tmp_path):
    """Uses JAX without a cache, and a separate home folder; restores both afterwards."""
    before = {name: jax.config.values[name] for name in _SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def told():
    said = []
    keep_programs(said.append)
    return said


def test_programs_are_kept_in_a_folder_that_only_this_user_writes_to(tmp_path):
    before = os.umask(0o002)  # the default of many Linux distributions
    assert told() == []
    os.umask(before)
    (folder,) = (tmp_path / "axon_dist").iterdir()
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("foreign", ["mode", "parent", "user"])
def test_a_foreign_folder_is_refused(foreign, tmp_path, monkeypatch):
    ProgramStore(tmp_path / "axon_dist" / "host")
    if foreign == "user":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        monkeypatch.setattr("axon_dist.train.app.resume._host", lambda: "host")
        folder = tmp_path / "axon_dist" / ("host" if foreign == "mode" else "")
        folder.chmod(0o770)
    (said,) = told()
    assert said.startswith(f"compiled programs are not kept: '{tmp_path}/axon_dist")
    assert "an executable is code; make it writable only by user" in said
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_another_folder_and_no_folder_stay_what_they_are(tmp_path):
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    assert told() == []
    assert jax.config.values["jax_compilation_cache_dir"] == "/elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert told() == []
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "compiled programs are not kept: [Errno" in told()[0]


def test_a_program_is_loaded_where_all_is_equal_alone(tmp_path):
    """A different constant, shape, compiler option, or a changed file makes JAX compile again."""
    store, loaded = ProgramStore(tmp_path / "axon_dist" / "host"), []

    def get(key):
        program = store.get(key)
        loaded.append(program is not None)
        return program

    keep_executables(store.path, get, store.put)

    def run(constant=2.0, size=3, **options):
        def stale(x):
            return x * constant

        loaded.clear()
        shape = jax.ShapeDtypeStruct((size,), jnp.float32)
        compiled = jax.jit(stale, compiler_options=options).lower(shape).compile()
        (found,) = loaded
        jax.clear_caches()
        x = jax.device_put(np.ones(size, np.float32), jax.devices()[0])
        assert compiled(x).tolist() == [constant] * size
        return found

    assert not run()
    assert run()
    assert not run(constant=3.0)
    assert not run(size=4)
    assert not run(xla_backend_optimization_level=1)
    assert run()
    for file in store.path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert not run()
    assert run()


@pytest.mark.full
def test_a_loaded_step_gives_the_bits_of_the_compiled_one(tmp_path, world):
    store, loaded = ProgramStore(tmp_path / "axon_dist" / "host"), []

    def get(key):
        program = store.get(key)
        loaded.append((key.rpartition("-")[0], program is not None))
        return program

    keep_executables(store.path, get, store.put)
    batch = {"x": np.linspace(0.0, 1.0, 32, dtype=np.float32).reshape(8, 4)}

    def train():
        loaded.clear()
        jax.clear_caches()
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        loss_fn = lambda model, batch: jnp.mean((jnp.tanh(model(batch["x"])) - 0.3) ** 2)
        step = build_train_step(model, optax.adam(1e-2), loss_fn, ddp(), world)
        state = step.init()
        assert orders_collectives(step.lower(batch).compile().as_text())
        for _ in range(3):
            state, metrics = step(state, batch)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, metrics))]

    compiled = train()
    assert ("jit_train_step", False) in loaded
    assert train() == compiled
    assert ("jit_train_step", True) in loaded
    assert ("jit_train_step", False) not in loaded


def test_files_of_a_killed_writer_are_absent(tmp_path, monkeypatch):
    store = ProgramStore(tmp_path / "axon_dist" / "host")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.put("program", b"half")
    assert store.get("program") is None
    store.put("program", b"whole")
    assert store.get("program") == b"whole"


def test_the_programs_that_were_not_used_for_longest_go(tmp_path):
    folder = tmp_path / "axon_dist" / "host"
    store = ProgramStore(folder)
    for age, name in enumerate("abc"):
        store.put(name, bytes(1000))
        os.utime(folder / f"{name}-program", (1e9 - age, 1e9 - age))
    store.get("c")
    ProgramStore(folder, most_bytes=1500)
    assert [file.name for file in folder.iterdir()] == ["c-program"]


def test_a_program_is_read_from_a_file_system_that_is_read_only(tmp_path, monkeypatch):
    store = ProgramStore(tmp_path / "axon_dist" / "host")
    store.put("key", b"program")

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert store.get("key") == b"program"
