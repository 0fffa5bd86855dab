"""Eight emulated devices, a shared compilation cache, and no silent promotion."""

import gc
import math
import os
import pathlib
import tempfile
import zlib

import hypothesis
import jax
import pytest

import axon_dist.mesh.world as mesh_world
from axon_dist.launch import distributed
from axon_dist.mesh import World

# Tests compile much and run little, so code that compiles a third faster and runs slower is better.
# Partitioning, fusion and memory are decided before this stage. XLA_FLAGS= turns this off.
# One code module per program instead of 32: each has a fixed cost, and two cores gain nothing.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)

# Without deadlines: a busy machine must not fail a test.
# The default run tries 25 examples of a property, --hypothesis-profile=thorough 400.
hypothesis.settings.register_profile("unhurried", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile("unhurried")

# Worlds of CPU devices do not use the cache of jaxlib 0.12, whose programs can confuse two
# collectives. Programs as small as these have not done so in whole runs from a warm cache, and
# without it the suite takes longer. Tests of large programs are marked `uncached`.
# AXON_TEST_AS_USERS=1 keeps the check as users have it.
if "AXON_TEST_AS_USERS" not in os.environ:
    distributed.runs_cached_collectives_in_order = lambda: True

# All tests of a process share one backend.
mesh_world.can_restart = lambda: False

# Collection creates many objects that stay, so garbage collection is off until it has finished.
gc.disable()

DEVICES = 8
WORLD = World.emulate(DEVICES)

_CACHE = os.environ.get("AXON_TEST_CACHE") or pathlib.Path(tempfile.gettempdir(), "axon-test-cache")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
os.environ.setdefault("XDG_CACHE_HOME", str(_CACHE))  # runs in separate processes
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def world() -> World:
    """All eight devices on one data axis."""
    return WORLD


@pytest.fixture
def make_world():
    """Builds a world over the first devices: `make_world("dp=2,tp=2")`."""

    def make(axes: str) -> World:
        sizes = [int(part.split("=")[1]) for part in axes.split(",")]
        return World.emulate(math.prod(sizes), axes)

    return make


def pytest_addoption(parser):
    """`--every N` runs every N-th of the collected tests, `--third K` one of three parts."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run every N-th test")
    parser.addoption(
        "--third",
        type=int,
        choices=(1, 2, 3),
        metavar="K",
        help="run the K-th third of the tests: 1, 2 or 3; a test stays in its third, whatever "
        "tests are added",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Sends the tests of a file to one worker if possible, so they share single-device results."""
    from xdist.scheduler import WorkStealingScheduling  # noqa: PLC0415

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Skips the doctest search, object by object, in files whose text contains no example."""
    found = yield
    if file_path.suffix != ".py" or ">>>" in file_path.read_text():
        return found
    return [one for one in found if type(one).__name__ != "DoctestModule"]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Checks that every entry of a `sample` mark is a row of the test's table."""
    result = yield
    marker = metafunc.definition.get_closest_marker("sample")
    rows = [call.id for call in metafunc._calls]
    unknown = set(marker.args) - set(rows) if marker is not None else set()
    if unknown:
        name = metafunc.definition.nodeid
        raise ValueError(f"{name} has no rows {sorted(unknown)} for its sample, it has {rows}")
    return result


def pytest_itemcollected(item):
    """Marks the rows of a table that are not in its `sample` as `full`."""
    marker, call = item.get_closest_marker("sample"), getattr(item, "callspec", None)
    if marker is not None and call is not None and call.id not in marker.args:
        item.add_marker(pytest.mark.full)


def third_of(name: str) -> int:
    """Returns the third that a test belongs to, which depends only on its name."""
    return zlib.crc32(name.encode()) % 3 + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselects the tests that `--third` and `--every` exclude."""
    third, every = config.getoption("--third"), config.getoption("--every")
    of_third = [item for item in items if third in (None, third_of(item.nodeid))]
    kept = of_third[::every]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def pytest_collection_finish():
    """Freezes the objects of ten thousand collected tests, so the garbage collector skips them."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # Traces make many objects that refer to each other and stay.
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Turns the cache off for aot tests: a compiler without its device cannot read the cache."""
    is_cached = not any(map(item.get_closest_marker, ("aot", "uncached")))
    jax.config.update("jax_enable_compilation_cache", is_cached)
    return (yield)
