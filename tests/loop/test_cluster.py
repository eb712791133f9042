"""What the variables of clusters say about this process."""

import pytest

from mpjax.config import Distributed
from mpjax.errors import UsageError
from mpjax.loop import Seat, own_gpus, seat_of


STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}


@pytest.fixture
def variables(monkeypatch):
    """Sets variables in the environment, from which JAX reads them, and returns what stands there."""

    def of(given):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        return given

    return of


def test_flags_are_taken_as_they_are():
    found = seat_of(Distributed(coordinator="a:1234", processes=2, process=1), STEP)
    assert found == Seat("a:1234", 2, 1)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}]
)
def test_without_a_cluster_a_process_is_alone(environment):
    assert seat_of(Distributed(), environment) is None


def test_a_number_of_tasks_that_is_none_is_an_error():
    with pytest.raises(UsageError, match=r"SLURM_NTASKS is 'two' .*: wanted a number, or --distributed"):
        seat_of(Distributed(), {"SLURM_NTASKS": "two"})


def test_one_process_is_alone_whatever_the_cluster_says():
    assert seat_of(Distributed(processes=1), STEP) is None


def test_slurm_says_where_process_0_is_and_which_gpu_is_whose(variables):
    found = seat_of(Distributed(), variables({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}))
    assert found == Seat(f"node07:{61440 + 4711 % 4096}", 8, 6, (2,))


def test_slurm_without_srun_is_an_error():
    with pytest.raises(UsageError, match="SLURM gave this job 4 tasks, and this step has 1: start it with srun python"):
        seat_of(Distributed(), {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"})


def test_open_mpi_that_hides_its_address_is_an_error(variables):
    with pytest.raises(UsageError, match="Open MPI started 2 processes, and JAX cannot tell where process 0 is: write"):
        seat_of(Distributed(), variables({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}))


def test_open_mpi_says_where_process_0_is(variables):
    ranks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    found = seat_of(Distributed(), variables({**ranks, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1:34911"}))
    assert found == Seat(f"10.96.0.1:{61440 + 1314521088 // 4096 % 4096}", 2, 1, (1,))


def test_kubernetes_without_its_package_is_an_error(monkeypatch):
    monkeypatch.setattr("mpjax.loop.cluster._is_installed", lambda package: False)
    with pytest.raises(UsageError, match="this is pod 3 of an indexed Kubernetes job, .*: pip install kubernetes, or"):
        seat_of(Distributed(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"})


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4, 5)),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),  # no GPU
        ({"CUDA_VISIBLE_DEVICES": "2"}, None),  # bound by --gpu-bind
        ({"CUDA_VISIBLE_DEVICES": "2", "SLURM_LOCALID": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "8"}, None),  # by single:2
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "6,2", "SLURM_LOCALID": "1"}, (1,)),
    ],
)
def test_a_task_has_its_share_of_the_gpus_that_it_sees(given, gpus):
    assert own_gpus(STEP | given) == gpus


@pytest.mark.parametrize("local", ["0", "2"])
def test_tasks_that_share_the_only_gpu_of_a_node_are_an_error(local):
    one = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1", "SLURM_LOCALID": local}
    says = "started 4 tasks on this node, which has 1 GPU: write --ntasks-per-node=1, one task for all"
    with pytest.raises(UsageError, match=says):
        own_gpus(STEP | one)


def test_gpus_that_do_not_divide_among_tasks_are_an_error():
    says = "started 4 tasks on this node, which has 6 GPUs: write --ntasks-per-node=6, one task for each GPU, or"
    with pytest.raises(UsageError, match=says):
        own_gpus({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SLURM_LOCALID", "one", "SLURM_LOCALID is 'one' in the environment: wanted a number"),
        ("SLURM_NODEID", "-", "SLURM_NODEID is '-' in the environment: wanted a number"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3", r"SLURM's list of tasks is '2\(x3': wanted numbers, as in 2\(x3\),1"),
    ],
)
def test_a_malformed_variable_of_slurm_is_an_error(name, value, says):
    with pytest.raises(UsageError, match=says):
        own_gpus({**STEP, name: value})
