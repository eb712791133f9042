"""Finds which process of a run this is, of how many, from flags or from the environment of a cluster."""

import dataclasses
import os
import pathlib
import re
import warnings
from collections.abc import Mapping

from mpjax.config.limits import check_distributed
from mpjax.config.schema import Distributed
from mpjax.errors import UsageError, reason_of


@dataclasses.dataclass(frozen=True)
class Seat:
    """Identifies a process among the processes of a run.

    Attributes:
      coordinator: the address of process 0, HOST:PORT.
      processes: the number of processes of the run.
      process: the number of this process, from 0.
      gpus: the indices, among the visible GPUs, of the GPUs that this process uses; None for all.
    """

    coordinator: str
    processes: int
    process: int
    gpus: tuple[int, ...] | None = None


def seat_of(settings: Distributed, environment: Mapping[str, str] = os.environ) -> Seat | None:
    """Finds which process of a run this is; None if it runs alone.

    If `settings.processes` is set, the settings decide. Otherwise JAX's detection of clusters decides, which runs only
    if the environment may be that of a cluster, and may ask other machines.

    Raises:
      UsageError: the settings are incomplete or wrong, the variables of the cluster are wrong or contradict each
        other, the other processes cannot be found, or the GPUs of a node do not divide evenly among its tasks.
    """
    check_distributed(settings)
    if settings.processes:
        alone = settings.processes == 1
        return None if alone else Seat(settings.coordinator, settings.processes, settings.process)
    return _detected(settings.timeout, environment) if _may_be_one_of_several(environment) else None


def _may_be_one_of_several(environment: Mapping[str, str]) -> bool:
    """True if a cluster may have started this process as one of several; reads environment variables only.

    It is true in a SLURM or Open MPI job of more than one task, on any TPU, and in a pod of an indexed Kubernetes job.
    A process on a TPU or in a pod may still be the only one.

    Raises:
      UsageError: a variable with a number of tasks is not a number.
    """
    if any(_count(environment, name) > 1 for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")):
        return True
    # A single pod has no index. JAX's detection of TPUs queries the machine's metadata, so it runs only on a TPU.
    on_tpu = any(name in environment for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_NAME"))
    return on_tpu or ("KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment)


def _count(environment: Mapping[str, str], name: str, unset: int = 1) -> int:
    """Reads a number from the variable `name`; `unset` if it is not set, or empty, as users set it to train alone.

    Raises:
      UsageError: the variable is not a number.
    """
    text = environment.get(name) or str(unset)
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment: wanted a number, {_ALONE}")
    return int(text)


_ALONE = "or --distributed.processes 1 if it is to train alone"
_FLAGS = "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I"


def _detected(timeout: float, environment: Mapping[str, str]) -> Seat | None:
    """Finds which process of a run this is by JAX's detection of clusters; None if JAX finds no other process.

    Raises:
      UsageError: JAX's detection fails or does not find process 0; the package `kubernetes` is missing in a pod; or
        `_check_slurm` refuses the step.
    """
    if "JOB_COMPLETION_INDEX" in environment and not _is_installed("kubernetes"):
        raise UsageError(
            f"this is pod {environment['JOB_COMPLETION_INDEX']} of an indexed Kubernetes job, and the package that "
            f"finds the others is missing: pip install kubernetes, or write {_FLAGS}, {_ALONE}"
        )
    _check_slurm(environment)
    from mpjax.jax_internals import cluster_environment  # which imports JAX

    detect = cluster_environment().auto_detect_unset_distributed_params
    try:
        with warnings.catch_warnings(action="ignore"):
            detected = detect(None, None, None, None, None, int(timeout))
    except Exception as error:  # each cluster has its own errors: a missing variable, a service without rights
        raise UsageError(
            f"cannot find the other processes of this run: {reason_of(error)}; write {_FLAGS}, {_ALONE}"
        ) from error
    coordinator, processes, process, local = detected
    if coordinator is None and "OMPI_COMM_WORLD_SIZE" in environment:  # JAX cannot detect version 5 or later
        size = environment["OMPI_COMM_WORLD_SIZE"]
        raise UsageError(
            f"Open MPI started {size} processes, and JAX cannot tell where process 0 is: write {_FLAGS}, with "
            f"$OMPI_COMM_WORLD_RANK as I, {_ALONE}"
        )
    if coordinator is None or process is None or processes in (None, 1):
        return None
    gpus = own_gpus(environment) if environment.get("SLURM_NTASKS") else local
    return Seat(coordinator, processes, int(process), None if gpus is None else tuple(gpus))


def _check_slurm(environment: Mapping[str, str]) -> None:
    """Raises UsageError if a SLURM job has several tasks and this step has another number, as without `srun`.

    It accepts any process that Open MPI started.
    """
    tasks = environment.get("SLURM_NTASKS") or "1"
    if tasks == "1" or "OMPI_COMM_WORLD_SIZE" in environment:
        return
    in_step = environment.get("SLURM_STEP_NUM_TASKS", tasks if "SLURM_STEP_NODELIST" in environment else "1")
    if in_step != tasks:
        raise UsageError(
            f"SLURM gave this job {tasks} tasks, and this step has {in_step}: start it with srun python "
            f"scripts/train.py …, {_ALONE}"
        )


def own_gpus(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Chooses the GPUs of this SLURM task, as indices among the visible GPUs; None for all visible GPUs.

    The tasks of a node divide its GPUs equally, in order. The result is None if the node has one task or no GPU, or if
    SLURM shows each task only its own GPUs, as with `--gpus-per-task`. JAX itself would use one GPU, by the task's
    number on its node: the wrong one with `--gpus-per-task`, and too few if there are fewer tasks than GPUs.

    Raises:
      UsageError: the GPUs of the node do not divide evenly among its tasks, or a variable of SLURM is malformed.
    """
    tasks, local = _tasks_on_node(environment), _count(environment, "SLURM_LOCALID", 0)
    gpus = _visible_gpus(environment)
    bound = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    # --gpu-bind shows each task GPUs of its own: those of all tasks are on the node. An old SLURM does not say how many
    # there are.
    on_node = _count(environment, "SLURM_GPUS_ON_NODE", tasks if "CUDA_VISIBLE_DEVICES" in environment else 0)
    if tasks == 1 or gpus == 0 or bound or gpus * tasks <= on_node:
        return None
    if gpus % tasks:
        per_gpu = "" if gpus == 1 else f"--ntasks-per-node={gpus}, one task for each GPU, or "
        raise UsageError(
            f"SLURM started {tasks} tasks on this node, which has {gpus} GPU{'s' * (gpus > 1)}: write "
            f"{per_gpu}--ntasks-per-node=1, one task for all"
        )
    per_task = gpus // tasks
    return tuple(range(local * per_task, (local + 1) * per_task))


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Parses the number of tasks on this node from SLURM's list for all nodes, such as `2(x3),1`; 1 without one.

    Raises:
      UsageError: the list or the number of the node is malformed.
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    counts: list[int] = []
    for group in text.split(","):
        if not (matched := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)):
            raise UsageError(f"SLURM's list of tasks is {text!r}: wanted numbers, as in 2(x3),1; {_ALONE}")
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts[min(_count(environment, "SLURM_NODEID", 0), len(counts) - 1)]


def _visible_gpus(environment: Mapping[str, str]) -> int:
    if "CUDA_VISIBLE_DEVICES" in environment:
        return len([gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def _is_installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None
