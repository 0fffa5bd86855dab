import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core import files
from axon_dist.core.errors import LaunchError
from axon_dist.launch.distributed import Timeouts, complete
from axon_dist.launch.environment import from_env

TORCH = {"MASTER_ADDR": "192.168.1.100", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def where(env):
    spec = from_env(env)
    return spec.coordinator_address, spec.num_processes, spec.process_id, spec.local_device_ids


def test_no_settings_mean_one_process():
    spec = from_env({})
    assert where({}) == ("localhost:29500", 1, 0, None)
    assert (spec.local_rank, spec.is_distributed) == (0, False)
    assert from_env({"MASTER_PORT": ""}) == from_env({"MASTER_PORT": "29501"}) == spec
    assert from_env({"MASTER_PORT": "tcp://10.0.0.1:443"}) == spec


@given(count=st.integers(1, 64), data=st.data())
def test_torchrun(count, data):
    process = data.draw(st.integers(0, count - 1))
    env = {"WORLD_SIZE": str(count), "RANK": str(process)}
    assert where(env) == ("localhost:29500", count, process, None)


def test_a_rank_of_torchrun():
    assert where(TORCH | {"LOCAL_RANK": "0"}) == ("192.168.1.100:29500", 8, 4, (0,))


def test_a_process_alone_on_its_host_takes_all_devices():
    assert where(TORCH | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})[3] is None
    assert where(TORCH | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})[3] == (3,)


def test_the_port_of_torchruns_own_store_is_left_to_it():
    assert where(TORCH | {"TORCHELASTIC_USE_AGENT_STORE": "True"})[0] == "192.168.1.100:29501"


def test_addresses_of_version_6():
    assert where(TORCH | {"MASTER_ADDR": "fe80::1"})[0] == "[fe80::1]:29500"


def test_world_size_1_needs_no_rank():
    assert not from_env({"WORLD_SIZE": "1"}).is_distributed


def test_jax_variables():
    env = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert where(env) == ("a:1", 2, 1, None)
    assert where(env | {"JAX_COORDINATOR_ADDRESS": "a", "JAX_COORDINATOR_PORT": "7"})[0] == "a:7"


def test_sagemaker_starts_one_process_per_host():
    env = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
    assert where(env) == ("algo-1:29500", 2, 1, None)


@pytest.mark.parametrize(
    ("env", "source", "count", "process"),
    [
        (SLURM, "slurm", 4, 3),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3",
            },
            "ompi", 2, 1,
        ),
        ({"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "2"}, "k8s", None, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "gketpu", None, None),
        ({"AXON_CLUSTER": "gcetpu"}, "gcetpu", None, None),
    ],
)  # fmt: skip
def test_clusters_that_jax_asks(env, source, count, process):
    spec = from_env(env)
    assert (spec.source, spec.num_processes, spec.process_id) == (source, count, process)
    assert spec.coordinator_address is None
    assert spec.is_distributed


def test_open_mpi_5_with_an_address():
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": "a"}
    assert where(env | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == ("a:29500", 2, 1, (1,))
    # The only process of a host has all its devices.
    alone = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert where(env | alone) == ("a:29500", 2, 1, None)


OMPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3",
}


def test_open_mpi_4_with_an_address_of_the_user():
    assert where(OMPI_4)[0] is None
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert where(OMPI_4 | address) == ("a:7", 2, 1, (0,))


MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("env", [MPICH, MVAPICH, PALS])
def test_the_ranks_of_other_mpis_need_the_address_of_rank_0(env):
    assert where(env | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}) == ("a:7", 4, 3, (1,))
    with pytest.raises(LaunchError, match=r"started 4 processes, .*MASTER_ADDR.*=mpi4py"):
        from_env(env)


def test_the_address_of_ranks_on_one_host_is_known():
    assert where(MPICH | {"MPI_LOCALNRANKS": "4"}) == ("localhost:29500", 4, 3, (1,))
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert where(env | local) == ("localhost:29500", 2, 1, (1,))


def test_a_rank_alone_on_its_host_takes_all_devices():
    alone = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a"}
    assert where(MPICH | alone) == ("a:29500", 4, 3, None)


def test_tasks_of_srun_are_those_of_slurm_unless_mpiexec_started_more():
    assert from_env(SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3"}).source == "slurm"
    # A shell of srun is one task, and so is each daemon of mpiexec.
    shell = SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert where(shell | MPICH | {"MASTER_ADDR": "a"}) == ("a:29500", 4, 3, (1,))


PODS = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "pod-0",
    "PET_MASTER_PORT": "7",
}


def test_a_pod_with_options_of_torchrun_that_did_not_start_it_is_one_process():
    assert where(PODS) == ("pod-0:7", 2, 1, None)
    # Where torchrun did start the process, its variables count.
    assert where(PODS | TORCH | {"LOCAL_RANK": "4"})[1:] == (8, 4, (4,))


FIRST = SLURM | {"SLURM_LOCALID": "0"}
"""The first task of a node."""


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3"}, None),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "0"}, None),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "1"}, (0,)),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, (0,)),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, None),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "1,3"}, (0,)),
        (FIRST | {"SLURM_STEP_TASKS_PER_NODE": "?"}, (0,)),
        (FIRST, (0,)),
        (SLURM, (1,)),
        # A daemon of mpirun is the only task of its node; the ranks inherit its variables.
        (
            OMPI_4
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            (0,),
        ),
        (OMPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, None),
    ],
)  # fmt: skip
def test_the_only_task_of_a_node_takes_all_its_devices(env, devices):
    assert from_env(env).local_device_ids == devices


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (SLURM | {"ROCR_VISIBLE_DEVICES": "0"}, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "h100:2"}, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "1"}, (1,)),
        (OMPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, None),
        (TORCH | {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, None),
        # Processes that a task of SLURM starts inherit its variables, and share its GPUs.
        (
            TORCH | {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"},
            (1,),
        ),
    ],
)
def test_a_process_takes_all_devices_that_are_shown_to_it_alone(env, devices):
    assert from_env(env).local_device_ids == devices


def test_the_local_rank_is_that_of_the_launcher():
    assert from_env(SLURM).local_rank == 1
    assert from_env(OMPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}).local_rank == 1


@pytest.mark.parametrize("named", [{}, {"AXON_CLUSTER": "slurm"}])
@pytest.mark.parametrize(("tasks", "devices"), [("1(x2)", None), ("2(x2)", (0,))])
def test_the_answer_of_the_cluster_leaves_the_devices_of_a_lone_task(
    monkeypatch, named, tasks, devices
):
    env = FIRST | named | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    spec = complete(from_env(env), Timeouts())
    assert (spec.num_processes, spec.process_id, spec.local_device_ids) == (4, 3, devices)
    assert spec.coordinator_address.startswith("n0:")


@pytest.mark.parametrize(
    "env",
    [
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},
        SLURM | {"AXON_CLUSTER": "none"},
        {"KUBERNETES_SERVICE_HOST": "k"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"MV2_COMM_WORLD_SIZE": "1", "MV2_COMM_WORLD_RANK": "0"},
        MPICH | {"AXON_CLUSTER": "none"},
        PODS | {"PET_NNODES": "1"},
    ],
)
def test_one_process_of_a_cluster_is_alone(env):
    assert not from_env(env).is_distributed


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, r"process 8 of 8; .* from 0 to 7: check RANK"),
        ({"RANK": "1"}, r"RANK=1 is set, but WORLD_SIZE is not; set both for every process"),
        ({"RANK": "0"}, r"RANK=0 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set, but RANK is not; set both for every process"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"RANK=-1 must be at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"WORLD_SIZE=0 must be at least 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"RANK is 'x', which is not an integer"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, r"WORLD_SIZE is '2.0'"),
        (TORCH | {"MASTER_PORT": "abc"}, r"MASTER_PORT is 'abc', which is not an integer"),
        (TORCH | {"MASTER_PORT": "70000"}, r"MASTER_PORT is 70000; .* 1 to 65535"),
        (TORCH | {"MASTER_PORT": "0"}, r"MASTER_PORT is 0"),
        (TORCH | {"MASTER_PORT": ""}, r"MASTER_PORT is '', which is not an integer"),
        ({"MASTER_PORT": "abc"}, r"MASTER_PORT is 'abc', which is not an integer"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT is 70000; .* 1 to 65535"),
        (SLURM | {"MASTER_PORT": "abc"}, r"MASTER_PORT is 'abc', which is not an integer"),
        (
            TORCH | {"MASTER_ADDR": " "},
            r"MASTER_ADDR is empty; give only the name or the address of",
        ),
        (TORCH | {"MASTER_ADDR": "http://x"}, r"MASTER_ADDR is 'http://x'; .* without a scheme"),
        (TORCH | {"MASTER_ADDR": "node0:29500"}, r"MASTER_ADDR is 'node0:29500'; .* a port or"),
        (TORCH | {"MASTER_ADDR": "a b"}, r"MASTER_ADDR is 'a b'"),
        (TORCH | {"MASTER_ADDR": "x" * 254}, r"MASTER_ADDR is 'xxx"),
        (TORCH | {"LOCAL_RANK": "-1"}, r"LOCAL_RANK=-1 must be at least 0"),
        (
            TORCH | {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
            r"LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4: .* from 0 to 3",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, r"JAX_NUM_PROCESSES and JAX_PROCESS_ID not; set all"),
        ({"JAX_PROCESS_ID": "1"}, r"JAX_PROCESS_ID=1 set, .*JAX_NUM_PROCESSES not"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, r"SM_HOSTS is 'algo-1'.* JSON list"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, r"SM_CURRENT_HOST=b is not one of"),
        ({"SM_HOSTS": '["a"]'}, r"SM_CURRENT_HOST=None is not one of"),
        ({"SM_HOSTS": '["a", "a"]', "SM_CURRENT_HOST": "a"}, r"names a host twice"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            r"since version 5 .* -x MASTER_ADDR",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_RANK is not; .*AXON_CLUSTER=none"),
        ({"PMI_SIZE": "2"}, r"PMI_SIZE=2 is set, but PMI_RANK is not"),
        (
            PODS | {"PET_NNODES": "1:2"},
            r"PET_NNODES=1:2 .*torchrun --no-python, or set MASTER_ADDR",
        ),
        ({"PET_NNODES": "2"}, r"PET_NNODES=2 .* RANK and WORLD_SIZE are not set"),
        ({"AXON_CLUSTER": "slrum"}, r"unknown cluster 'slrum'\. Did you mean 'slurm'\?"),
    ],
)
def test_wrong_environments(env, words):
    with pytest.raises(LaunchError, match=words):
        from_env(env)


V1 = "memory/slurm/job_7/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/slurm/job_7/step_0", {"slurm/job_7/memory.max": "300\n"}, 300),
        (
            "0::/slurm/job_7/step_0",
            {"slurm/memory.max": "400", "slurm/job_7/memory.max": "max"},
            400,
        ),
        ("0::/slurm/job_7", {"slurm/job_7/memory.max": "500", "memory.max": "200"}, 200),
        ("4:cpu:/\n3:memory,hugetlb:/slurm/job_7/task_0\n0::/", {V1: "600"}, 600),
        ("3:memory:/slurm/job_7", {V1: str(2**63 - 4096), "memory/slurm/memory.max": "1"}, None),
        # In a container without a namespace of its own, the path is that outside.
        ("0::/docker/abc", {"memory.max": "700"}, 700),
        ("0::/../sibling", {"memory.max": "800", "sibling/memory.max": "1"}, 800),
        ("0::/", {"memory/memory.limit_in_bytes": "900"}, 900),
        (None, {"memory.max": "950"}, 950),
        ("0::/slurm/job_7", {}, None),
    ],
)
def test_the_memory_of_a_host_is_that_of_the_groups_around_the_process(
    tmp_path, monkeypatch, own, limits, expected
):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, text in limits.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(files, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(files, "_OWN_GROUPS", tmp_path / "own")
    assert files.host_memory() == (machine if expected is None else expected)
