"""The worker of a run on Ray: joins the other processes, trains, and reports to Ray."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpjax.commands.host_memory import keep_freed_memory
from mpjax.commands.train import run
from mpjax.config.schema import Config
from mpjax.errors import Diverged, Interrupted, UsageError, show_warning
from mpjax.extend import Writer
from mpjax.loop.signals import Stop
from mpjax.loop.stored import CHECKPOINTS, complete_checkpoints


if TYPE_CHECKING:
    import ray.train


def work(config: Config, exchange: Any, started_in: str) -> dict | None:
    """Trains as one process of a run; Ray calls it in each worker. It changes the working directory of the process.

    Args:
      config: the settings, with the folder of the run and `resume`.
      exchange: the handle of an `Exchange` (train_ray.py).
      started_in: the working directory of the command, from which relative paths start; ignored if it does not exist
        on this machine.

    Returns:
      The contents of `summary.json`; None after a UsageError, Diverged or Interrupted, here or in another worker, which
        `exchange` records. Other errors pass, and Ray then restarts the workers.
    """
    import ray
    import ray.train

    if ray.get(exchange.ended.remote()):
        return None  # another worker had an error, and Ray has restarted the workers that it brought down
    if os.path.isdir(started_in):
        os.chdir(started_in)
    keep_freed_memory()
    warnings.showwarning = show_warning
    reports = Reports(config, first=ray.train.get_context().get_world_rank() == 0)
    try:
        return run(_placed(config), writers=[reports], stopping=lambda stop: _stopping(stop, exchange))
    except (UsageError, Diverged, Interrupted) as error:
        ray.get(exchange.end.remote(error))
        return None


def _placed(config: Config) -> Config:
    """Sets `distributed` in the settings: the address of process 0, the number of processes, and this worker's number.

    All workers must call it together. It sets a random secret of the run in this process's environment.
    """
    import ray.train.collective
    import ray.util

    context = ray.train.get_context()
    chosen: Any = None
    if context.get_world_rank() == 0:
        with socket.create_server(("", 0)) as server:
            chosen = f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}", secrets.token_hex(16)
    address, secret = ray.train.collective.broadcast_from_rank_zero(chosen)
    os.environ["MPJAX_SECRET"] = secret
    distributed = dataclasses.replace(
        config.distributed,
        coordinator=address,
        processes=context.get_world_size(),
        process=context.get_world_rank(),
    )
    return dataclasses.replace(config, distributed=distributed)


@contextlib.contextmanager
def _stopping(stop: Stop, exchange: Any) -> Iterator[None]:
    """Context that starts a thread, which calls `stop.ask` once the command has received a signal.

    The thread outlives the context.
    """
    import ray

    listening = threading.Thread(target=lambda: stop.ask(ray.get(exchange.stopped.remote())), daemon=True)
    listening.start()
    yield


class Reports(Writer):
    """A writer that reports to Ray: metrics at each evaluation and checkpoint, and checkpoints when they are complete.

    Ray waits for the reports of all workers, so each worker has a `Reports`. Only the first reports checkpoints.

    Args:
      config: the settings of the run.
      first: whether this is the first worker.
    """

    def __init__(self, config: Config, *, first: bool):
        self._checkpoints = pathlib.Path(config.output_dir) / CHECKPOINTS
        self._first = first
        self._metrics: dict[str, float] = {}
        self._closed = threading.Event()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics. If any is a `test/…` metric, reports the last value of every metric so far to Ray."""
        self._metrics |= {**metrics, "step": step}
        if any(name.startswith("test/") for name in metrics):
            self._report(None)

    def saved(self, step: int) -> None:
        """Reports the last value of each metric so far to Ray; the first worker adds the checkpoint."""
        self._report(self._checkpoints / str(step) if self._first else None)

    def close(self) -> None:
        """Ends the wait for checkpoints that are being written: they are complete by now."""
        self._closed.set()

    def _report(self, checkpoint: pathlib.Path | None) -> None:
        import ray.train

        ray.train.report(
            dict(self._metrics),
            checkpoint=ray.train.Checkpoint.from_directory(checkpoint) if checkpoint else None,
            # Ray calls this in a separate thread. There is nothing to upload: the checkpoint is already in place.
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._complete,
            delete_local_checkpoint_after_upload=False,
        )

    def _complete(self, checkpoint: "ray.train.Checkpoint", name: str) -> "ray.train.Checkpoint":
        """Waits until the checkpoint or a later one is complete, or until `close`; returns the checkpoint unchanged.

        Ray calls it in place of an upload. `name` is ignored.
        """
        position = int(pathlib.Path(checkpoint.path).name)
        while max(complete_checkpoints(self._checkpoints), default=0) < position and not self._closed.wait(0.2):
            pass
        return checkpoint
