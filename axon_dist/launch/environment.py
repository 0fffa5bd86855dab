"""`from_env`: reads a `LaunchSpec` from environment variables, one reader per launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence

from ..core.arguments import check_fields
from ..core.errors import LaunchError, did_you_mean

DEFAULT_HOST = "localhost"
DEFAULT_PORT = 29500


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How the environment launched this process.

    Args:
        coordinator_address: `host:port` where process 0 listens; None lets JAX ask the cluster.
        num_processes: the number of processes; None lets JAX ask the cluster.
        process_id: the index of this process; None lets JAX ask the cluster.
        local_rank: the index of this process among those on this host.
        local_device_ids: the accelerators of this host that the process uses; None for all.
        source: the launcher: `default`, `torchrun`, `sagemaker`, `mpi`, `jax`, or a cluster's name
            in `jax.distributed`, such as `slurm`.

    Raises:
        LaunchError: if the process id or the address is invalid.

    Example:
        >>> LaunchSpec().is_distributed
        False
        >>> LaunchSpec(num_processes=2, process_id=2)
        Traceback (most recent call last):
            ...
        axon_dist.core.errors.LaunchError: got process 2 of 2; processes count from 0 to 1: check...
    """

    coordinator_address: str | None = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    num_processes: int | None = 1
    process_id: int | None = 0
    local_rank: int = 0
    local_device_ids: tuple[int, ...] | None = None
    source: str = "default"

    def __post_init__(self) -> None:
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raises `LaunchError` unless the process id and the address are valid."""
        if self.num_processes is not None and self.num_processes < 1:
            raise LaunchError(f"got {self.num_processes} processes; start at least one")
        process = self.process_id
        count = self.num_processes
        if process is not None and count is not None and not 0 <= process < count:
            raise LaunchError(
                f"got process {process} of {count}; processes count from 0 to {count - 1}: check "
                "RANK and WORLD_SIZE, or the variables that your launcher sets instead"
            )
        if self.coordinator_address is not None:
            split_address(self.coordinator_address)

    @property
    def is_complete(self) -> bool:
        """Whether no field has to be asked from the cluster."""
        return None not in (self.coordinator_address, self.num_processes, self.process_id)

    @property
    def is_distributed(self) -> bool:
        """Whether there are, or may be, other processes."""
        return self.num_processes != 1


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`, also `[::1]:port`.

    Raises:
        LaunchError: if it does not have that form, or the port is invalid.

    Example:
        >>> split_address("10.0.0.1:29500")
        ('10.0.0.1', 29500)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise LaunchError(f"the coordinator address {address!r:.80} is not host:port; give both")
    named = parse_host(host, "the coordinator's host")
    return named.strip("[]"), parse_port(port, "the coordinator's port")


def bind_address(address: str) -> tuple[str, int]:
    """Where process 0 listens: at the coordinator's address if it belongs to this host.

    Args:
        address: `host:port`.

    Returns:
        Host and port. The host is "", which means all addresses, if the name belongs to another
        machine that forwards connections, such as a Kubernetes service, or if only this host
        resolves the name to its loopback address.

    Example:
        >>> bind_address("localhost:29500")[0] in ("127.0.0.1", "::1")
        True
    """
    host, port = split_address(address)
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, sockaddr in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                # Binding any free port tests whether the address belongs to this host.
                probe.bind((sockaddr[0], 0))
                own = str(sockaddr[0])
                # Debian writes `127.0.1.1 NAME` into /etc/hosts, but other hosts resolve the name
                # to an address of the network, and connect there.
                return "" if _is_loopback(own) and not _is_loopback(host) else own, port
    return "", port


def _is_loopback(host: str) -> bool:
    """Whether a name or an address means the same host everywhere: the one that resolves it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_host(text: str, name: str) -> str:
    """Checks the name or address of a host, without a port.

    Args:
        text: a name or address such as `node0`, `10.0.0.1`, `::1` or `[::1]`.
        name: the variable or option, for messages.

    Returns:
        The host; an IPv6 address in brackets.

    Raises:
        LaunchError: for a URL, a host with a port, or an invalid name.

    Example:
        >>> parse_host("::1", "MASTER_ADDR")
        '[::1]'
    """
    host = text.strip()
    if re.fullmatch(r"[\w.-]{1,253}", host, re.ASCII):
        return host
    address = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        # The address may end with a zone, as in fe80::1%eth0.
        ipaddress.IPv6Address(address)
    except ValueError:
        what = f"{host!r:.80}" if host else "empty"
        raise LaunchError(
            f"{name} is {what}; give only the name or the address of a host, such as localhost "
            "or 10.0.0.1, without a scheme, a port or a path"
        ) from None
    return f"[{address}]"


def parse_port(text: str, name: str) -> int:
    """Reads a TCP port.

    Raises:
        LaunchError: with the variable's name, if it is not a number from 1 to 65535.
    """
    port = parse_count(text, name)
    if not 1 <= port <= 65535:
        raise LaunchError(f"{name} is {port}; set a port from 1 to 65535, such as {DEFAULT_PORT}")
    return port


def parse_count(text: str, name: str) -> int:
    """Reads an integer from an environment variable.

    Raises:
        LaunchError: with the variable's name, if it is not an integer.
    """
    # `int` would also accept digits of other scripts, and underscores.
    if not text.isascii() or re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) is None:
        raise LaunchError(f"{name} is {text!r:.80}, which is not an integer; set a number")
    return int(text)


Environment = Mapping[str, str]

CLUSTER = "AXON_CLUSTER"
"""The variable with the cluster's name, or `none`, to override the detection."""

_JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_CLUSTERS = ("slurm", "ompi", "mpi4py", "k8s", "gcetpu", "gketpu")


def from_env(env: Environment) -> LaunchSpec:
    """Reads from the environment how this process was launched; starts nothing.

    It looks in this order for `AXON_CLUSTER`; the variables of torchrun, which Azure ML, vast.ai,
    Kubernetes templates and `axon launch` set too (`MASTER_ADDR MASTER_PORT WORLD_SIZE RANK
    LOCAL_RANK`), or the `PET_*` that Kubeflow sets for torchrun's options; those of JAX
    (`JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID`); SageMaker; Open MPI and MVAPICH,
    with `MASTER_ADDR`, except Open MPI 4, which `jax.distributed` can ask; SLURM; MPICH and Intel
    MPI, with `MASTER_ADDR`; Kubernetes jobs and TPU pods on GKE. Without any of them there is one
    process.

    Args:
        env: the environment, as in `os.environ`.

    Returns:
        The spec.

    Raises:
        LaunchError: if the variables contradict each other, some are missing, or `MASTER_PORT` is
            not a port, even if it is not used.

    Example:
        >>> spec = from_env({"WORLD_SIZE": "8", "RANK": "4", "MASTER_ADDR": "10.0.0.1"})
        >>> spec.coordinator_address, spec.num_processes, spec.process_id
        ('10.0.0.1:29500', 8, 4)
        >>> from_env({}).is_distributed
        False
    """
    # Kubernetes sets `MASTER_PORT=tcp://...` in every pod if a service is called master.
    port = env.get("MASTER_PORT", "")
    if port and not port.startswith("tcp://"):
        parse_port(port, "MASTER_PORT")
    for reader in (_named_cluster, *_READERS):
        spec = reader(env)
        if spec is not None:
            return spec
    if "JAX_COORDINATOR_ADDRESS" in env:
        raise LaunchError(_some_missing(env, _JAX_VARIABLES[1:]))
    return LaunchSpec()


def _named_cluster(env: Environment) -> LaunchSpec | None:
    name = env.get(CLUSTER)
    if name is None:
        return None
    if name == "none":
        return LaunchSpec()
    if name not in _CLUSTERS:
        options = did_you_mean(name, (*_CLUSTERS, "none"))
        raise LaunchError(f"{CLUSTER} names the unknown cluster {name!r}.{options}")
    return _ask_cluster(name)


def _ask_cluster(name: str, count: int | None = None, process: int | None = None) -> LaunchSpec:
    return LaunchSpec(
        coordinator_address=None, num_processes=count, process_id=process, source=name
    )


def _torchrun(env: Environment) -> LaunchSpec | None:
    if "WORLD_SIZE" not in env and "RANK" not in env:
        return None
    alone = {"RANK": "0"} if env.get("WORLD_SIZE") == "1" else {}
    return dataclasses.replace(
        _ranked({**alone, **env}, "WORLD_SIZE", "RANK"),
        coordinator_address=f"{_master(env)}:{_port(env)}",
        local_rank=_count(env, "LOCAL_RANK"),
        local_device_ids=_local_devices(env),
        source="torchrun",
    )


def _torchrun_options(env: Environment) -> LaunchSpec | None:
    """A pod of Kubeflow whose program torchrun has not started: one process per node."""
    nodes = env.get("PET_NNODES", "1")
    if nodes in ("1", "1:1"):
        return None
    if ":" in nodes or any(name not in env for name in ("PET_NODE_RANK", "PET_MASTER_ADDR")):
        raise LaunchError(
            f"PET_NNODES={nodes:.80} announces torchrun on several nodes, but RANK and WORLD_SIZE "
            "are not set; start the program by torchrun --no-python, or set MASTER_ADDR, "
            f"WORLD_SIZE and RANK on every node, or {CLUSTER}=none for a single process"
        )
    host = parse_host(env["PET_MASTER_ADDR"], "PET_MASTER_ADDR")
    port = parse_port(env.get("PET_MASTER_PORT", str(DEFAULT_PORT)), "PET_MASTER_PORT")
    return dataclasses.replace(
        _ranked(env, "PET_NNODES", "PET_NODE_RANK"),
        coordinator_address=f"{host}:{port}",
        source="torchrun",
    )


def _master(env: Environment) -> str:
    return parse_host(env.get("MASTER_ADDR", DEFAULT_HOST), "MASTER_ADDR")


def _port(env: Environment) -> int:
    """The port. Under torchrun itself it is the next one, because its store uses the first."""
    port = parse_port(env.get("MASTER_PORT", str(DEFAULT_PORT)), "MASTER_PORT")
    is_in_use = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return parse_port(str(port + is_in_use), "MASTER_PORT + 1")


def _local_devices(env: Environment) -> tuple[int, ...] | None:
    """One accelerator per process; None, for all, if the host has only one process."""
    if "LOCAL_RANK" not in env:
        return None
    local = _count(env, "LOCAL_RANK")
    if "LOCAL_WORLD_SIZE" in env:
        here = _count(env, "LOCAL_WORLD_SIZE", at_least=1)
        if local >= here:
            raise LaunchError(
                f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={here}: local ranks count from 0 to "
                f"{here - 1}; correct one of them"
            )
        return local_devices(env, local, here)
    return local_devices(env, local)


def local_devices(env: Environment, local: int, here: int | None = None) -> tuple[int, ...] | None:
    """The accelerators of a process: one each; None, for all it sees, if they are its own.

    Args:
        env: the environment.
        local: the index of the process among those on its host.
        here: the number of processes on its host; None if it is not known.
    """
    # A process counts only those it sees, so a single one is number 0 whatever the local rank is.
    if (here == 1 and local == 0) or _num_shown(env) == 1:
        return None
    return (local,)


def _num_shown(env: Environment) -> int | None:
    """The number of accelerators that this process sees; None if the environment does not say."""
    return min((len(env[name].split(",")) for name in _VISIBLE if name in env), default=None)


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _jax(env: Environment) -> LaunchSpec | None:
    """Reads JAX's own variables; on a cluster only the address may be set."""
    if "JAX_NUM_PROCESSES" not in env and "JAX_PROCESS_ID" not in env:
        return None
    missing = [name for name in _JAX_VARIABLES if name not in env]
    if missing:
        raise LaunchError(_some_missing(env, missing))
    address = env["JAX_COORDINATOR_ADDRESS"]
    port = env.get("JAX_COORDINATOR_PORT")
    return LaunchSpec(
        coordinator_address=address if port is None or ":" in address else f"{address}:{port}",
        num_processes=_count(env, "JAX_NUM_PROCESSES", at_least=1),
        process_id=_count(env, "JAX_PROCESS_ID"),
        source="jax",
    )


def _some_missing(env: Environment, missing: Sequence[str]) -> str:
    present = [f"{name}={env[name]}" for name in _JAX_VARIABLES if name in env]
    return (
        f"{' and '.join(present)} set, but {' and '.join(missing)} not; set all of "
        f"{', '.join(_JAX_VARIABLES)}, or none for a single process"
    )


def _sagemaker(env: Environment) -> LaunchSpec | None:
    """One process per host with all of its devices; process 0 is on the first host by name."""
    if "SM_HOSTS" not in env:
        return None
    hosts = _host_list(env["SM_HOSTS"])
    current = env.get("SM_CURRENT_HOST")
    if current not in hosts:
        raise LaunchError(
            f"SM_CURRENT_HOST={current} is not one of SM_HOSTS={', '.join(hosts)}; SageMaker sets "
            "both: check that nothing overwrites them"
        )
    return LaunchSpec(
        coordinator_address=f"{parse_host(hosts[0], 'SM_HOSTS')}:{_port(env)}",
        num_processes=len(hosts),
        process_id=hosts.index(current),
        source="sagemaker",
    )


def _host_list(text: str) -> list[str]:
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts) or not hosts:
        raise LaunchError(f'SM_HOSTS is {text!r:.80}; it must be a JSON list, as in ["algo-1"]')
    if len(set(hosts)) < len(hosts):
        raise LaunchError(f"SM_HOSTS={text:.80} names a host twice; every host runs one process")
    return sorted(hosts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mpi:
    """The variables that the launchers of an MPI set for a rank.

    Args:
        name: the MPI, for messages.
        source: the source of the spec.
        count: the variable with the number of ranks.
        process: the variable with the rank.
        local: the variables with the rank on this host, by launcher; one of them is set.
        here: the variables with the number of ranks on this host; one of them may be set.
        fails_to: the words between the name and "tell them where rank 0 runs".
        option: how a user adds the host of rank 0.
    """

    name: str
    source: str
    count: str
    process: str
    local: tuple[str, ...]
    here: tuple[str, ...]
    fails_to: str
    option: str

    def read(self, env: Environment) -> LaunchSpec | None:
        """Reads how the launcher started this rank; None if another launcher started it."""
        if self.count not in env:
            return None
        names = _ranked(env, self.count, self.process)
        count = names.num_processes
        if count == 1:
            return LaunchSpec()
        here = next((_count(env, name, at_least=1) for name in self.here if name in env), None)
        local = next((name for name in self.local if name in env), None)
        if local is not None:
            index = _count(env, local)
            devices = local_devices(env, index, here)
            names = dataclasses.replace(names, local_rank=index, local_device_ids=devices)
        names = dataclasses.replace(names, coordinator_address=None, source=self.source)
        has_address = "MASTER_ADDR" in env
        if "OMPI_MCA_orte_hnp_uri" in env and (not has_address or "JAX_COORDINATOR_ADDRESS" in env):
            # JAX knows where mpirun of Open MPI 4 runs, and reads its own variable first.
            return names
        if not has_address and here != count:
            raise LaunchError(
                f"{self.name} started {count} processes, but {self.fails_to} tell them where rank "
                f"0 runs; {self.option}, or set {CLUSTER}=mpi4py if mpi4py is installed, or "
                f"{CLUSTER}=none for processes that train alone"
            )
        return dataclasses.replace(names, coordinator_address=f"{_master(env)}:{_port(env)}")


_OPEN_MPI = _Mpi(
    name="Open MPI",
    source="ompi",
    count="OMPI_COMM_WORLD_SIZE",
    process="OMPI_COMM_WORLD_RANK",
    local=("OMPI_COMM_WORLD_LOCAL_RANK",),
    here=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    fails_to="since version 5 it does not",
    option="add -x MASTER_ADDR=<host of rank 0> to mpirun",
)
_MVAPICH = _Mpi(
    name="MVAPICH",
    source="mpi",
    count="MV2_COMM_WORLD_SIZE",
    process="MV2_COMM_WORLD_RANK",
    local=("MV2_COMM_WORLD_LOCAL_RANK",),
    here=("MV2_COMM_WORLD_LOCAL_SIZE",),
    fails_to="it does not",
    option="add MASTER_ADDR=<host of rank 0> before the program of mpirun_rsh",
)
_PMI = _Mpi(
    name="MPI",
    source="mpi",
    count="PMI_SIZE",
    process="PMI_RANK",
    local=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    here=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    fails_to="it does not",
    option="add -genv MASTER_ADDR <host of rank 0> to mpiexec",
)
"""MPICH, Intel MPI and Cray's PALS. The PMI plugins of srun set these too, so SLURM comes first."""


def _slurm(env: Environment) -> LaunchSpec | None:
    """A process started by `srun`; a shell inside an allocation is a single process."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in env for name in needed):
        return None
    spec = _ranked(env, "SLURM_NTASKS", "SLURM_PROCID")
    if _PMI.count in env and _count(env, _PMI.count) != spec.num_processes:
        # SLURM counts the daemons of mpiexec, or a shell; the ranks inherit the variables of those.
        return None
    if spec.num_processes == 1:
        return LaunchSpec()
    local = _count(env, "SLURM_LOCALID")
    return dataclasses.replace(
        spec,
        coordinator_address=None,
        local_rank=local,
        local_device_ids=slurm_devices(env, local),
        source="slurm",
    )


def slurm_devices(env: Environment, local: int) -> tuple[int, ...] | None:
    """The accelerators of a task of SLURM; as `local_devices`.

    Args:
        env: the environment.
        local: the index of the task among those on its host.
    """
    # Only for the task itself: processes that it starts inherit these variables.
    own = re.search(r"\d{1,6}$", env.get("SLURM_GPUS_PER_TASK", ""), re.ASCII)
    shown = _num_shown(env)
    if own is not None and shown is not None and shown <= int(own[0]):
        return None
    return local_devices(env, local, _slurm_tasks(env))


def processes_here(env: Environment) -> int | None:
    """How many processes of this run are on this host; None if the launcher does not say."""
    # mpirun starts its daemons by srun, whose variables the ranks inherit; so SLURM's come last.
    for mpi in (_OPEN_MPI, _MVAPICH, _PMI):
        for name in mpi.here:
            if name in env:
                return _count(env, name, at_least=1)
    return _slurm_tasks(env)


def _slurm_tasks(env: Environment) -> int | None:
    """The tasks of this step on this node, from a list such as `2(x3),1`: three nodes with two."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    one = r"(\d{1,9})(?:\(x(\d{1,9})\))?"
    if re.fullmatch(rf"{one}(?:,{one})*", text, re.ASCII) is None:
        return None
    if "SLURM_NODEID" not in env and "," in text:
        return None
    node = _count(env, "SLURM_NODEID")
    for tasks, nodes in re.findall(one, text):
        node -= int(nodes or 1)
        if node < 0:
            return int(tasks)
    return None


def _kubernetes(env: Environment) -> LaunchSpec | None:
    """A pod of an indexed job; only the API server knows the job's size."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    return _ask_cluster("k8s", process=_count(env, "JOB_COMPLETION_INDEX"))


def _gke_tpu(env: Environment) -> LaunchSpec | None:
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES") or ""
    is_multislice = "MEGASCALE_NUM_SLICES" in env
    return _ask_cluster("gketpu") if "," in hosts or is_multislice else None


def _ranked(env: Environment, count: str, process: str) -> LaunchSpec:
    """Reads the two numbers that every launcher sets."""
    if process not in env or count not in env:
        present, missing = (count, process) if count in env else (process, count)
        raise LaunchError(
            f"{present}={env[present]} is set, but {missing} is not; set both for every process, "
            f"as launchers do, or set {CLUSTER}=none for a single process"
        )
    return LaunchSpec(num_processes=_count(env, count, at_least=1), process_id=_count(env, process))


def _count(env: Environment, name: str, at_least: int = 0) -> int:
    if name not in env:
        return at_least
    value = parse_count(env[name], name)
    if value < at_least:
        raise LaunchError(f"{name}={value} must be at least {at_least}; correct it")
    return value


_READERS: tuple[Callable[[Environment], LaunchSpec | None], ...] = (
    _torchrun,
    _torchrun_options,
    _jax,
    _sagemaker,
    _OPEN_MPI.read,
    _MVAPICH.read,
    _slurm,
    _PMI.read,
    _kubernetes,
    _gke_tpu,
)
