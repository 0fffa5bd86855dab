"""The only file that uses private names of JAX and Orbax, which may change in any release."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import math
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jaxlib
import numpy as np
from jax._src import array as jax_array
from jax._src import (
    cache_key,
    clusters,
    compilation_cache,
    config,
    core,
    distributed,
    pjit,
    sharding_impls,
    source_info_util,
    xla_bridge,
)
from jax._src import mesh as mesh_lib
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo
from jax.core import ShapedArray
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from .typing import Array, Function

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
"""Names of primitives that only call an inner jaxpr."""

REMATS = frozenset({"remat", "remat2", "checkpoint"})
"""Names that the primitive of `jax.checkpoint` has had."""

RARE = "axon_dist_rare"
"""The named scope of branches that hardly ever run; operation counters skip them."""

RUN_TWICE = "axon_dist_run_twice"
"""The named scope of a forward pass that the backward pass runs again."""

REDUCERS = frozenset({"reduce", "reduce_window"})
"""Primitives whose inner jaxpr combines two scalars, so their operands are not its inputs."""

_RENDEZVOUS_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)


def backend_started() -> bool:
    """Whether JAX has started a backend, after which device counts are fixed."""
    return xla_bridge.backends_are_initialized()


def rendezvous_flags() -> tuple[str, ...]:
    """XLA flags that let emulated devices wait for each other on a busy machine.

    XLA aborts the process if a device waits a minute for the others, which happens when eight
    devices share two cores. XLA also aborts at an unknown flag, so the flags are returned only for
    jaxlib versions known to have them.

    Returns:
        Flags for `XLA_FLAGS`; none if this jaxlib is not known to have them.
    """
    return _RENDEZVOUS_FLAGS if (0, 10) <= _jaxlib_version() <= (0, 12) else ()


def watchdog_flags(seconds: int) -> tuple[str, ...]:
    """XLA flags that end a process stuck in a GPU collective, later than the run's watchdogs do.

    Without them a process whose peer is gone may wait in an NCCL collective for ever, if its
    watchdog thread does not get to run. XLA aborts at an unknown flag, so the flags are returned
    only for jaxlib versions known to have them. Other platforms ignore them.

    Args:
        seconds: how long a process waits for others before it aborts.

    Returns:
        Flags for `XLA_FLAGS`; none if this jaxlib is not known to have them.
    """
    if not (0, 10) <= _jaxlib_version() <= (0, 12):
        return ()
    return (
        "--xla_gpu_nccl_terminate_on_error=true",
        f"--xla_gpu_nccl_termination_timeout_seconds={seconds}",
    )


def runs_cached_collectives_in_order() -> bool:
    """Whether XLA:CPU runs collectives in order in programs from JAX's compilation cache.

    Every `ppermute` has channel 1, so devices can tell two of them apart only by their order.
    In programs that jaxlib 0.12 loads from the cache, a device can be in two of them at once: most
    runs of a ring over 8 devices abort in rendezvous.h ("Id can't be larger than the number of
    participating threads") or hang. In the few runs that were tried, the same program freshly
    compiled did not, nor did any program with jaxlib 0.10.2 and 0.11.2.
    """
    return _jaxlib_version() < (0, 12)


def _jaxlib_version() -> tuple[int, int]:
    major, minor = jaxlib.__version__.split(".")[:2]
    return int(major), int(minor)


def keep_executables(
    folder: Path, get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]
) -> None:
    """Makes JAX's compilation cache keep all programs, even small ones, in a given store.

    Args:
        folder: the cache's path, where XLA also keeps its autotuning results.
        get: returns the program stored under a key, or None.
        put: stores a program under a key.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    store: Any = types.SimpleNamespace(_path=folder, get=get, put=put)
    compilation_cache._cache = store
    compilation_cache._cache_initialized = True


@functools.cache
def keep_only(is_kept: Callable[[str], bool]) -> None:
    """Makes JAX's cache store and load only programs for which `is_kept(optimized_hlo)`."""
    put = compilation_cache.put_executable_and_time

    # JAX passes these by position.
    def put_some(key: str, name: str, executable: Any, *others: Any) -> None:
        if all(is_kept(module.to_string()) for module in executable.hlo_modules()):
            put(key, name, executable, *others)

    def rule() -> str:
        return f"axon_dist: {is_kept.__name__}"

    compilation_cache.put_executable_and_time = put_some  # pyrefly: ignore[bad-assignment]
    # The hook is part of every cache key, so programs stored without this rule are not found.
    cache_key.custom_hook = rule


def gpu_pipelining(*kinds: str, on: bool = True) -> dict[str, str | bool]:
    """XLA:GPU options that pipeline collectives in a loop into the iteration before or after.

    XLA renamed these options and turned the booleans into modes (openxla/xla#45836). jaxlib 0.11.1
    was the first release with the new names, and it rejects the old ones.

    Args:
        kinds: collectives, of `all_gather`, `reduce_scatter` and `all_reduce`.
        on: whether to pipeline them.

    Returns:
        Options for `jax.jit(..., compiler_options=...)`.
    """
    if tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) < (0, 11, 1):
        return {f"xla_gpu_enable_pipelined_{kind}": on for kind in kinds}
    mode = "COLLECTIVE_PIPELINING_MODE_ON" if on else "COLLECTIVE_PIPELINING_MODE_OFF"
    return {f"xla_gpu_pipeline_{kind}": mode for kind in kinds}


class SharedStore:
    """The key-value store shared by the processes of `jax.distributed`."""

    def set(self, key: str, value: str) -> None:
        """Writes a value; overwrites an existing one."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def items(self, prefix: str) -> Mapping[str, str]:
        """All values under a prefix that ends in a slash; keys are without the prefix."""
        pairs = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value for key, value in pairs}

    def wait(self, name: str, seconds: float) -> None:
        """Returns when every process has reached the barrier; a name can be used only once."""
        self._client.wait_at_barrier(name, int(1000 * seconds))

    @property
    def _client(self) -> Any:
        client = distributed.global_state.client
        assert client is not None, "jax.distributed is not running"
        return client


def process_id() -> int:
    """The index of this process in `jax.distributed`, without starting a backend."""
    return distributed.global_state.process_id


def join_service(
    address: str,
    num_processes: int,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    *,
    connect_timeout: int,
    heartbeat_timeout: int,
    shutdown_timeout: int,
) -> None:
    """Like `jax.distributed.initialize`, but connects to a service that already runs elsewhere.

    Args:
        address: `host:port` of the service.
        num_processes: the number of processes.
        process_id: the index of this one.
        local_device_ids: the accelerators of this host that the process uses; None for those that
            `JAX_LOCAL_DEVICE_IDS` lists, or for all if it is not set.
        connect_timeout: seconds to wait for the service to answer.
        heartbeat_timeout: seconds without a heartbeat after which the service declares a process
            dead.
        shutdown_timeout: seconds that processes wait for each other at shutdown.
    """
    listed = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if local_device_ids is not None:
        listed = ",".join(map(str, local_device_ids))
    if listed:
        for kind in ("cuda", "rocm", "oneapi"):
            if f"jax_{kind}_visible_devices" in jax.config.values:
                jax.config.update(f"jax_{kind}_visible_devices", listed)
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=connect_timeout,
        heartbeat_timeout=heartbeat_timeout,
        shutdown_timeout=shutdown_timeout,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    partition = os.environ.get("JAX_PARTITION_INDEX")
    state.client = client
    state.coordinator_address = address
    state.process_id = process_id or 0
    state.num_processes = num_processes
    state.partition_index = None if partition is None else int(partition)


def detect_cluster(name: str, timeout: float) -> tuple[str, int, int, Sequence[int] | None]:
    """Detects the processes of a cluster by one of JAX's own methods.

    Args:
        name: the `cluster_detection_method` of `jax.distributed.initialize`.
        timeout: seconds that the cluster may take to answer.

    Returns:
        The coordinator's address, the number of processes, the id of this one, and the devices of
        this host that it uses (None for all).

    Raises:
        ValueError: if this is not such a cluster.
    """
    address, count, number, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, name, int(timeout)
    )
    if address is None or count is None or number is None:
        raise ValueError("JAX finds no such cluster here")
    return address, count, number, devices


def eval_jaxpr(closed: ClosedJaxpr, values: Sequence[Array]) -> list[Array]:
    """Runs a closed jaxpr on values, keeping the source lines of its equations."""
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *values)


def eval_equation(equation: JaxprEqn, values: Sequence[Array | np.ndarray]) -> list[Array]:
    """Runs one equation of a jaxpr on values, as a jaxpr interpreter does."""
    params = equation.primitive.get_bind_params(equation.params)
    with in_place_of(equation):
        results = equation.primitive.bind(*values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


@contextlib.contextmanager
def in_place_of(equation: JaxprEqn) -> Iterator[None]:
    """Traces its body with the name stack, source line and settings of an equation."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    context = source_info_util.user_context(equation.source_info.traceback, name_stack=names)
    with context, equation.ctx.manager:
        yield


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The inner program of an equation that calls it once, as `jit` or `checkpoint`; else None.

    The program's inputs are the last operands of the equation. Loops, branches and kernels are not
    calls.
    """
    if equation.primitive.name in REDUCERS | {"scan", "pallas_call"}:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        program = equation.params.get(key)
        if program is not None:
            # Before JAX 0.11 an open jaxpr had another type, without values for its constants.
            return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())
    return None


def expanded(equation: JaxprEqn) -> tuple[ClosedJaxpr, list[int]] | None:
    """The program that an operation with a derivative of its own computes, and what it reads.

    These are `custom_linear_solve`, and operations such as `jnp.searchsorted` that JAX expands only
    when it compiles them.

    Returns:
        The program and the positions of the operands that are its inputs; None for others.
    """
    positions = [*range(len(equation.invars))]
    if equation.primitive.name == "custom_linear_solve":
        sizes, program = equation.params["const_lengths"], equation.params["jaxprs"].solve
        start = sizes.matvec + sizes.vecmat
        return program, [*positions[start : start + sizes.solve], *positions[sum(sizes) :]]
    operation = equation.params.get("_prim")
    avals: list[Any] = [v.aval for v in equation.invars]
    if operation is None or not all(isinstance(aval, ShapedArray) for aval in avals):
        return None

    def run(*values: Array) -> list[Array]:
        arguments = jax.tree.unflatten(operation.in_tree, values)
        return jax.tree.leaves(operation.expand(*arguments))

    structs = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    return jax.make_jaxpr(run)(*structs), positions


def cudnn_operations() -> tuple[Primitive, Primitive]:
    """The primitives of cuDNN's fused attention, forward and backward."""
    kernels: Any = fused_attention_stablehlo
    forward = kernels._dot_product_attention_fwd_p_wrapper
    return forward, kernels._dot_product_attention_bwd_p_wrapper


def callback_function(value: Any) -> Any:
    """The user's function in the `callback` parameter of `pure_callback` and its like."""
    return getattr(value, "callback_func", value)


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """The numbers of constant and of carried operands of a `scan`."""
    if "num_consts" in equation.params:
        return equation.params["num_consts"], equation.params["num_carry"]
    consts, carry, _ = equation.params["ft_in"].unpack()  # since 0.11
    return len(consts), len(carry)


def inner_programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The open jaxprs inside an equation: bodies of calls, loops and branches."""
    for value in equation.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, (Jaxpr, ClosedJaxpr)):
                yield inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


def dce_jaxpr(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Drops all equations that the used outputs do not need, also inside calls and loops.

    Returns:
        The smaller jaxpr, and for each input whether it is kept.
    """
    with outside_meshes():
        return partial_eval.dce_jaxpr(jaxpr, list(used_outputs))


def _setting(name: str) -> Any:
    """A thread-local JAX setting; JAX 0.12 moved the mesh settings to another module."""
    return getattr(mesh_lib, name, None) or getattr(config, name)


_ABSTRACT_MESH = _setting("abstract_mesh_context_manager")
_CONCRETE_MESH = _setting("device_context")
_READER: Any = jax.make_user_context(None)
"""The current `ShardingReader`; it is part of the key of every JAX cache."""


class OwnContext:
    """Hides every mesh that a caller has in context, and sets the reader of named shardings.

    Inside it no mesh is in context, whatever `jax.set_mesh`, `jax.sharding.use_mesh` or
    `with mesh:` has put there, and arrays do not have the types of explicit meshes. Inside a
    function that JAX traces it changes nothing. It takes about two microseconds.

    Args:
        reader: a `ShardingReader`; must be hashable, because programs are cached by it.
    """

    __slots__ = ("_before", "_reader")

    def __init__(self, reader: Hashable):
        self._reader = reader
        self._before: Any = None

    def __enter__(self) -> None:
        if not core.trace_state_clean():
            return
        resources = mesh_lib.thread_resources
        is_legacy = not resources.env.physical_mesh.empty
        if is_legacy:
            _set_legacy_env(resources.env.with_mesh(mesh_lib.empty_concrete_mesh), ())
        reading = _READER(self._reader)
        reading.__enter__()
        self._before = (
            _ABSTRACT_MESH.swap_local(mesh_lib.empty_abstract_mesh),
            _CONCRETE_MESH.swap_local(mesh_lib.empty_concrete_mesh),
            reading,
            is_legacy,
        )

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        abstract, concrete, reading, is_legacy = self._before
        self._before = None
        _ABSTRACT_MESH.set_local(abstract)
        _CONCRETE_MESH.set_local(concrete)
        reading.__exit__(*error)
        if is_legacy:
            stack = mesh_lib.thread_resources.stack
            stack.pop()
            meshes = tuple(e.physical_mesh for e in stack if not e.physical_mesh.empty)
            mesh_lib.thread_resources.env = stack[-1]
            config.mesh_context_manager.set_local(meshes)


def _set_legacy_env(env: Any, meshes: tuple[Any, ...]) -> None:
    """Enters an environment as `with mesh:` enters a mesh."""
    mesh_lib.thread_resources.stack.append(env)
    mesh_lib.thread_resources.env = env
    config.mesh_context_manager.set_local(meshes)


def is_in_trace() -> bool:
    """Whether the caller is inside a function that JAX traces."""
    return not core.trace_state_clean()


def current_reader() -> Any:
    """The reader of the enclosing `OwnContext`, or None."""
    return _READER.value


class ShardingReader(Protocol):
    """Interprets the shardings that a model's code names, inside an `OwnContext`."""

    def placeholder(self, sharding: NamedSharding | PartitionSpec) -> NamedSharding:
        """A placeholder for a sharding that the model names, until its array is known."""
        ...

    def is_placeholder(self, sharding: NamedSharding) -> bool:
        """Whether a sharding was made by `placeholder`."""
        ...

    def is_foreign(self, mesh: Any) -> bool:
        """Whether a mesh is the caller's and not the step's."""
        ...

    def constrain(self, x: Array, sharding: NamedSharding, bind: Function) -> Array:
        """Constrains an array; `bind(array, sharding)` adds the constraint."""
        ...


@functools.cache
def read_shardings() -> None:
    """Patches JAX to ask the reader of an `OwnContext` about every sharding that a model names.

    A `PartitionSpec` in a model names axes of the mesh its author had in mind, which is not the
    step's mesh. JAX resolves it in two places: in `with_sharding_constraint`, and in
    `canonicalize_sharding` for `out_sharding` and `reshard`, which only explicit meshes use.
    Outside an `OwnContext` both behave as before.
    """
    importlib.import_module("jax.extend.core.primitives")
    _read_constraints()
    _read_out_shardings()
    _forget_explicit_types()


def _read_constraints() -> None:
    create = pjit._create_sharding_for_array
    constraint = pjit.sharding_constraint_p
    bind = constraint.bind

    def create_placeholder(mesh: Any, x: Any, name: str, api_name: str) -> Any:
        reader = current_reader()
        if reader is None or not isinstance(x, (PartitionSpec, NamedSharding)):
            return create(mesh, x, name, api_name)
        if api_name == "with_sharding_constraint":
            return reader.placeholder(x)
        if core.trace_state_clean() and not mesh.empty:
            # The caller has set a mesh inside this context, as JAX's `process_allgather` does. No
            # model asks for this sharding.
            return create(mesh, x, name, api_name)
        # A sharding of an inner `jit` in the model; inside a trace it is only a hint.
        return create(mesh, None if isinstance(x, PartitionSpec) else x, name, api_name)

    def bind_read(x: Array, **params: Any) -> Array:
        reader = current_reader()
        if reader is None or not isinstance(params["sharding"], NamedSharding):
            return bind(x, **params)

        def bind_on(x: Array, sharding: NamedSharding) -> Array:
            entries = enumerate(sharding.spec)
            free = frozenset(dim for dim, e in entries if e is PartitionSpec.UNCONSTRAINED)
            own = {**params, "sharding": sharding, "unconstrained_dims": free}
            return bind(x, **own)

        sharding = params["sharding"]
        return reader.constrain(x, sharding, bind_on)

    pjit._create_sharding_for_array = create_placeholder
    constraint.bind = bind_read


def _read_out_shardings() -> None:
    canonicalize = sharding_impls.canonicalize_sharding
    reshard = pjit.reshard_p
    bind = reshard.bind
    new_mesh = pjit._get_new_mesh

    def canonicalize_placeholder(sharding: Any, api_name: str, *args: Any, **options: Any) -> Any:
        reader = current_reader()
        if reader is None or not isinstance(sharding, (PartitionSpec, NamedSharding)):
            return canonicalize(sharding, api_name, *args, **options)
        if api_name != "reshard":
            # The axes of a step are automatic: its strategy decides the layout of results.
            return None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        if isinstance(sharding, NamedSharding) and not any(spec):
            # JAX itself brings closed-over arrays into a `shard_map` this way.
            return canonicalize(sharding, api_name, *args, **options)
        return reader.placeholder(spec)

    def bind_reshard(x: Array, **params: Any) -> Array:
        reader = current_reader()
        target = params["dst_sharding"]
        if reader is None or not reader.is_placeholder(target):
            return bind(x, **params)
        return pjit.with_sharding_constraint(x, target)

    def new_mesh_or_none(*args: Any, **options: Any) -> Any:
        # A step has no explicit axes, so none of them must become automatic.
        return new_mesh(*args, **options) if current_reader() is None else None

    for name, module in list(sys.modules.items()):
        if name.startswith("jax.") and vars(module).get("canonicalize_sharding") is canonicalize:
            module.canonicalize_sharding = canonicalize_placeholder  # type: ignore[attr-defined]
    reshard.bind = bind_reshard
    pjit._get_new_mesh = new_mesh_or_none


def _forget_explicit_types() -> None:
    """Drops the explicit mesh from the types of a caller's arrays, such as constants of a loss."""
    kind = jax_array.ArrayImpl
    typed = core.pytype_aval_mappings[kind]

    def untyped(x: Any) -> Any:
        reader = current_reader()
        if reader is not None:
            mesh = getattr(x.sharding, "mesh", None)
            if mesh is not None and reader.is_foreign(mesh):
                return ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
        return typed(x)

    core.pytype_aval_mappings[kind] = untyped


def outside_meshes() -> Any:
    """A context without a mesh.

    Where another mesh is in context, JAX 0.10 refuses a `shard_map` over a mesh of another size.
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@functools.cache
def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def is_library_file(name: str) -> bool:
    """Whether a source file is installed, or is one of Python's own, and so not the user's.

    Example:
        >>> is_library_file("/usr/lib/python3/dist-packages/flax/core.py")
        True
        >>> is_library_file("/home/ann/my-site-packages-of-2020/train.py")
        False
    """
    file = Path(name)
    # Python's imports run in frames of files such as `<frozen importlib._bootstrap>`.
    is_python = file.is_relative_to(_standard_library()) or name.startswith("<frozen ")
    # Debian installs its packages into folders of the second name.
    return is_python or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def source_line(equation: JaxprEqn) -> str:
    """The user's source line that made an equation, as `file.py:12`; "" if unknown.

    It is the innermost line outside installed packages, or else the innermost of all.
    """
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    outside = [frame for frame in frames if not is_library_file(frame.file_name)]
    first = (outside or frames)[:1]
    return f"{os.path.basename(first[0].file_name)}:{first[0].start_line}" if first else ""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a traceback in a user's program.

    Args:
        file: the full path.
        line: the line number, counted from 1.
        column: the column of the first character, counted from 0; None if unknown.
        end_column: the column after the last character, or None if that is on another line.
        function: the qualified name of the function.
    """

    file: str
    line: int
    column: int | None
    end_column: int | None
    function: str


def _own_frames(equation: JaxprEqn) -> list[Frame]:
    frames = []
    for found in source_info_util.user_frames(equation.source_info.traceback):
        ends = found.end_column if found.end_line == found.start_line else None
        column = found.start_column or None
        where = (found.file_name, found.start_line, column, ends, found.function_name)
        frames.append(Frame(*where))
    return frames


def _ends(name: str, last: str | None) -> bool:
    return last is not None and name.rpartition(".")[2] == last.rpartition(".")[2]


_GRADIENT_CALLS = ("value_and_grad_f", "grad_f", "vjp", "linearize", "_vjp")


def source_frames(
    equation: JaxprEqn, callers: Sequence[JaxprEqn] = ()
) -> tuple[list[Frame], Frame | None]:
    """Returns the frames of the user's program that made an equation.

    Args:
        equation: of a jaxpr.
        callers: the calls and loops that contain it, outermost first. JAX traces a function once
            even if it is called twice, so its equations carry the line of the first call. Those of
            a loop's body carry no line outside it.

    Returns:
        The frames outside JAX, innermost first, and the frame that asked for the gradient. That
        frame is given for equations of a backward pass, whose own line is in the forward pass. It
        is None for other equations, and in a derivative that the user wrote.
    """
    frames = _own_frames(equation)
    for caller in reversed(callers):
        outer = _own_frames(caller)
        program = called(caller)
        info = program.jaxpr.debug_info if program is not None else None
        name = getattr(info, "func_name", None)
        file = getattr(info, "func_filename", None)
        if not outer:
            continue
        if program is None:
            frames = [*frames, *(frame for frame in outer if frame not in frames)]
            continue
        within = [n for n, f in enumerate(frames) if f.file == file and _ends(f.function, name)]
        frames = [*frames[: within[0] + 1], *outer] if within else outer
    traceback = equation.source_info.traceback
    if traceback is None or "transpose" not in str(equation.source_info.name_stack):
        return frames, None
    lines = {(frame.file, frame.line): frame for frame in frames}
    is_within = False
    for raw in traceback.frames:
        name = raw.function_name.rpartition(".")[2]
        if name.startswith("backward_pass") and not is_within:
            return frames, None
        here = lines.get((raw.file_name, raw.line_num))
        if is_within and here is not None:
            return frames, here
        is_within = is_within or name in _GRADIENT_CALLS
    return frames, None


def map_axes(equation: JaxprEqn) -> tuple[str, ...]:
    """The manual axes of a `shard_map` equation, in mesh order."""
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    return tuple(name for name in params["mesh"].axis_names if name in axes)


def new_operation(
    name: str,
    run: Callable[..., tuple[Array, ...]],
    batched: Function | None = None,
    jvp: Function | None = None,
) -> Primitive:
    """A primitive that appears as one equation in a jaxpr and is compiled as `run`.

    Unlike with `jit`, the policies of `jax.checkpoint` see one equation, not those inside.

    Args:
        name: the name of its equations.
        run: (*arrays, **parameters) -> a tuple of arrays; parameters are hashable.
        batched: (arrays, their batch dims, **parameters) -> (results, their batch dims), the
            batching rule; None applies `jax.vmap` to `run`.
        jvp: (arrays, tangents, **parameters) -> (results, their tangents), the JVP rule as in
            `jax.custom_jvp`; a zero tangent is None. None for operations without a derivative.

    Returns:
        The primitive; `bind(*arrays)` returns a list.
    """
    operation = Primitive(name)
    operation.multiple_results = True
    compiled = functools.cache(lambda items: jax.jit(functools.partial(run, **dict(items))))

    def shapes(*avals: ShapedArray, **parameters: Hashable) -> list[ShapedArray]:
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        results = jax.eval_shape(functools.partial(run, **parameters), *structs)
        return [avals[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in results]

    def mapped(
        arrays: Sequence[Array], dims: Sequence[int | None], **parameters: Hashable
    ) -> tuple[list[Array], list[int]]:
        axes = tuple(dim if isinstance(dim, int) else None for dim in dims)
        results = jax.vmap(functools.partial(run, **parameters), in_axes=axes)(*arrays)
        return list(results), [0] * len(results)

    operation.def_impl(lambda *xs, **named: list(compiled(tuple(named.items()))(*xs)))
    operation.def_abstract_eval(shapes)
    batching.primitive_batchers[operation] = mapped if batched is None else batched
    mlir.register_lowering(operation, mlir.lower_fun(run, multiple_results=True))
    if jvp is not None:

        def jvp_rule(
            arrays: Sequence[Array], tangents: Sequence[Array | ad.Zero], **parameters: Hashable
        ) -> tuple[list[Array], list[Array]]:
            given_tangents = [None if isinstance(x, ad.Zero) else x for x in tangents]
            results, result_tangents = jvp(arrays, given_tangents, **parameters)
            return list(results), list(result_tangents)

        ad.primitive_jvps[operation] = jvp_rule
    return operation


def splash_flops(
    name: str, operands: Iterable[Sequence[int]], results: Iterable[Sequence[int]]
) -> int:
    """The matmul FLOPs of a splash attention kernel without a mask; 0 for other kernels.

    Args:
        name: the kernel's name. The backward pass is one kernel of five matmuls, or two kernels of
            four and of three.
        operands: shapes of the operands; the largest is that of the queries, `[..., T, K]`. There
            are as many keys as queries.
        results: shapes of the results.

    Example:
        >>> splash_flops("splash_mha_fwd_residuals", [(8, 64, 32)], [(8, 64, 32)])
        4194304
    """
    if "splash_m" not in name:
        return 0
    queries = max((shape for shape in operands if len(shape) > 2), key=math.prod)
    products = 3 if "_dq" in name else 2
    if "_dkv" in name:
        # The fused kernel writes a partial gradient of the queries for every block of keys.
        products = 5 if any(len(shape) > len(queries) for shape in results) else 4
    return products * 2 * math.prod(queries) * queries[-2]


def splash_gradients(
    kernel: Any,
    query: Array,
    key: Array,
    value: Array,
    segments: Any | None,
    log_weight: Array,
    out: Array,
    cotangent: Array,
) -> tuple[Array, Array, Array]:
    """Runs the backward kernels of splash attention with a given logsumexp.

    Args:
        kernel: a result of `splash_kernel`.
        query: `[H, T, K]`, scaled.
        key: `[N, T, K]`.
        value: `[N, T, K]`.
        segments: `SegmentIds`, or None.
        log_weight: float32 `[H, T]`, the logsumexp; it may cover more keys than `key` has.
        out: `[H, T, K]`, the attention output over all of those keys.
        cotangent: the cotangent of `out`.

    Returns:
        The gradients of the scaled queries, of the keys and of the values.
    """
    options = kernel.kwargs
    saved = (query, key, value, segments, None, out, log_weight)
    masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
    gradients = splash_attention_kernel._splash_attention_bwd(
        False,
        options["mask_value"],
        options["is_mqa"],
        options["block_sizes"],
        options["residual_checkpoint_name"],
        options["mask_function"],
        options["attn_logits_soft_cap"],
        options["interpret"],
        (*saved, *masks),
        cotangent,
    )
    d_query, d_key, d_value = gradients[3:6]
    return d_query, d_key, d_value


class _KvSpec(dict[str, Any]):
    """The key-value spec that Orbax builds for a folder; it is JSON already."""

    to_json = dict.copy


def _count_nothing(*direction: str) -> None:
    """Replaces Orbax's byte counter; returns None, which means that nothing was counted."""


def stop_leaks_of_saves() -> None:
    """Stops Orbax from asking TensorStore for JSON, which TensorStore 0.1.86 never frees.

    Every save asks for the counters that Orbax logs and for the folder of every leaf. Each leaf
    leaks 24 objects and 600 bytes. Orbax versions without these names are left as they are.
    """
    with contextlib.suppress(ImportError, AttributeError):
        name = "orbax.checkpoint._src.serialization.tensorstore_utils"
        utils: Any = importlib.import_module(name)
        if isinstance(utils.ts, types.ModuleType):
            kinds = types.SimpleNamespace(Spec=_KvSpec, open=utils.ts.KvStore.open)
            names = {**vars(utils.ts), "KvStore": kinds}
            utils.ts = types.SimpleNamespace(**names)
            utils.get_tensorstore_raw_bytes = _count_nothing


def end_failed_saves() -> None:
    """Makes a failing save of Orbax 0.12 wait for its other writes before it closes their loop.

    Otherwise each of those writes reports the closed loop after the error itself.
    """
    with contextlib.suppress(ImportError, AttributeError):
        utils: Any = importlib.import_module("orbax.checkpoint._src.asyncio_utils")
        run = utils._run_sync_via_new_loop
        if not hasattr(run, "__wrapped__"):
            waiting = functools.wraps(run)(lambda coroutine: run(_after_all(coroutine)))
            utils._run_sync_via_new_loop = waiting


def array_metadata_store() -> Any:
    """The store in which Orbax 0.12 checks that all processes write shards of one shape.

    Returns None if the installed Orbax lacks it.
    """
    with contextlib.suppress(ImportError, AttributeError):
        name = "orbax.checkpoint._src.metadata.array_metadata_store"
        return importlib.import_module(name).Store()


async def _after_all(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except BaseException:
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=60)
        raise


def is_computed(value: object) -> bool:
    """Whether a traced value is the result of an operation, also of one within `jax.jit`.

    False for arguments, which `jax.jit` may pass through, and for results of other inner programs,
    such as those of `jax.checkpoint` and of loops.
    """
    tracer: Any = getattr(value, "primal", value)
    parent = getattr(tracer, "parent", None)
    return parent is not None and _computes(parent, tracer.val)


def _computes(equation: Any, result: object) -> bool:
    """Whether an equation computes a result of its own, and does not pass an argument through."""
    programs = list(inner_programs(equation))
    if not programs:
        return True
    if equation.primitive.name not in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call"):
        return False
    (program,) = programs
    at = next(i for i, variable in enumerate(equation.outvars) if variable is result)
    inner = program.outvars[at]
    if any(inner is variable for variable in program.invars):
        return False
    producers = (each for each in program.eqns if any(inner is v for v in each.outvars))
    producer = next(producers, None)
    # A result that no equation produces is a constant.
    return producer is None or _computes(producer, inner)
