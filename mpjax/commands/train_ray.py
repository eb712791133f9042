"""Trains on a Ray cluster: Ray starts a worker for each process of the run, and restarts all if one dies."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import pathlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from mpjax.config.commands import OnRay
from mpjax.config.folders import check_run_folder, run_folder
from mpjax.config.limits import check
from mpjax.config.load import CONFIG_FILE
from mpjax.config.schema import Config
from mpjax.errors import UsageError
from mpjax.loop.signals import StopRequest, stop_on_signals


if TYPE_CHECKING:
    import ray.train


QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would send them to its makers
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags start from the working directory of the command
    "RAY_DEDUP_LOGS": "0",  # lines of a training look alike
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each line twice
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it prints the internal logs of libraries
}
"""Environment variables of Ray that are set unless the user has set them."""

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray's list of the reported checkpoints, in the run's folder."""


def train_on_ray(settings: OnRay, config: Config) -> "ray.train.Result":
    """Trains the run that `config` describes, in workers that Ray starts, and waits for its end.

    SIGINT or SIGTERM asks all workers to save a checkpoint and stop.

    Args:
      settings: the workers, and how often Ray restarts them from the last checkpoint.
      config: the settings of the run. All nodes need its `output_dir`.

    Returns:
      Ray's result: the last checkpoint, the metrics up to it, and as `return_value` the contents of `summary.json`.

    Raises:
      UsageError: as `mpjax.run`; or Ray is not installed or cannot be reached, or this machine has too few devices. A
        new run's folder is removed if it has no metrics.
      Diverged: as `mpjax.run`.
      Interrupted: SIGINT or SIGTERM arrived here; a checkpoint was saved.
      OSError: workers died more often than `settings.restarts`.
      ray.train.TrainingFailedError: workers failed for another reason more often than `settings.restarts`.
    """
    settings.check(config)
    check(config)
    check_run_folder(config)
    resources = _start_ray(settings)
    import ray.train
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    folder = run_folder(config).resolve()
    (folder / SNAPSHOT).unlink(missing_ok=True)  # left by an earlier command; the checkpoints that it names may be gone
    actor: Any = ray.remote(num_cpus=0)(Exchange)
    exchange = actor.remote()
    trainer = JaxTrainer(
        _work,
        train_loop_config={
            "config": dataclasses.replace(config, output_dir=str(folder), resume=True),
            "exchange": exchange,
            "started_in": os.getcwd(),
        },
        jax_config=JaxConfig(),  # the run itself starts JAX over all processes
        scaling_config=ray.train.ScalingConfig(
            num_workers=settings.workers, use_gpu="GPU" in resources, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(folder.parent),  # Ray takes checkpoints from below storage_path/name
            name=folder.name,
            failure_config=ray.train.FailureConfig(max_failures=settings.restarts),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    with stop_on_signals(_PassedOn(exchange)):
        result, failure = _fit(trainer)
    error: Exception | None = ray.get(exchange.ended.remote()) or failure
    if isinstance(error, UsageError) and not config.resume:
        _clear(folder)
    if error:
        raise _explained(error, settings.restarts)
    return result


def _work(arguments: dict) -> dict | None:
    from mpjax.commands.ray_worker import work  # only workers import JAX, because they own the devices

    return work(**arguments)


def _start_ray(settings: OnRay) -> dict[str, int]:
    """Starts Ray on this machine or connects to a cluster; returns the CPUs and GPUs of each worker, as `{"CPU": 1}`.

    A Ray that this process has already started is used as it is. Environment variables get the values in `QUIET`,
    unless they are set.

    Raises:
      UsageError: Ray is not installed, cannot be reached, or this machine is too small.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not importlib.util.find_spec("ray"):
        raise UsageError("Ray is not installed: pip install -e '.[ray]'")
    import ray

    if not ray.is_initialized():
        check_reachable(settings.address)
        try:
            ray.init(
                address=settings.address or None,
                include_dashboard=False,
                logging_level=logging.ERROR,
                logging_config=ray.LoggingConfig(log_level="ERROR"),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = settings.address or os.environ.get("RAY_ADDRESS", "this machine")
            raise UsageError(f"no Ray cluster at {where}: {error}") from error
    there = ray.cluster_resources()
    gpus = settings.gpus if settings.gpus >= 0 else min(1, int(there.get("GPU", 0)))
    resources = {"CPU": settings.cpus} | ({"GPU": gpus} if gpus else {})
    here_alone = not settings.address and "RAY_ADDRESS" not in os.environ and len(ray.nodes()) == 1
    for name, count in resources.items():
        if here_alone and settings.workers * count > there.get(name, 0):  # Ray would wait for more machines
            raise UsageError(
                f"{settings.workers} workers with {count} {name}s each need {settings.workers * count} {name}s, and "
                f"this machine has {there.get(name, 0):g}: write a smaller --workers or --{name.lower()}s, or a "
                "cluster's --address"
            )
    return resources


def check_reachable(address: str) -> None:
    """Raises UsageError if no process accepts a TCP connection at `address`, HOST:PORT, within 10 seconds.

    Ray itself would try for minutes. Addresses of another form, such as `auto`, are not checked.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # auto, local, ray://...
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UsageError(f"no Ray cluster at {address}: {error.strerror or error}") from error


class Exchange:
    """A Ray actor that passes a request to stop from the command to its workers, and an error from a worker to all."""

    def __init__(self):
        self._asked = asyncio.Event()
        self._signal_number = 0
        self._end: Exception | None = None

    async def stop(self, signal_number: int) -> None:
        """Asks the workers to stop, because the command received this signal."""
        self._signal_number = signal_number
        self._asked.set()

    async def stopped(self) -> int:
        """Waits until `stop` is called; returns its signal."""
        await self._asked.wait()
        return self._signal_number

    async def end(self, error: Exception) -> None:
        """Records an error that ended the run and would end another attempt too; only the first error is kept."""
        self._end = self._end or error

    async def ended(self) -> Exception | None:
        """The first error that `end` has recorded; None if there is none."""
        return self._end


class _PassedOn(StopRequest):
    """A request to stop that is also sent to the workers, through an `Exchange`, without waiting for them."""

    def __init__(self, exchange: Any):
        super().__init__()
        self._exchange = exchange

    def ask(self, signal_number: int) -> None:
        super().ask(signal_number)
        self._exchange.stop.remote(signal_number)


def _fit(trainer: Any) -> tuple[Any, Exception | None]:
    """Calls `trainer.fit` in a thread and waits; returns its result and its exception, of which one is None.

    In the main thread, Ray would take Ctrl-C for a request to kill the workers.
    """
    outcome: list = [None, None]

    def fit() -> None:
        try:
            outcome[0] = trainer.fit()
        except Exception as error:
            outcome[1] = error

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    thread.join()
    return outcome[0], outcome[1]


def _explained(error: Exception, restarts: int) -> Exception:
    """Returns an OSError with a message for the user, if `error` says that a worker died; else `error` itself."""
    import ray.exceptions
    import ray.train

    failures = error.worker_failures.values() if isinstance(error, ray.train.WorkerGroupError) else [error]
    causes = [getattr(failure, "health_check_failure", failure) for failure in failures]  # Ray noticed the death
    if not any(isinstance(cause, ray.exceptions.RayActorError) for cause in causes):
        return error
    return OSError(
        f"workers died more often than --restarts {restarts} allows: Ray's logs say why; --resume continues from the "
        "last checkpoint"
    )


def _clear(folder: pathlib.Path) -> None:
    """Removes config.toml and Ray's files from the folder of a run, and then the folder, if nothing else is in it.

    So the corrected command can use the folder. It does nothing if the folder has metrics.jsonl.
    """
    if (folder / "metrics.jsonl").exists():
        return
    for file in (CONFIG_FILE, SNAPSHOT, *(path.name for path in folder.glob(".validate_storage_marker*"))):
        (folder / file).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
