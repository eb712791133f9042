"""Reports a lack of memory: checks the host's memory before a run, and names settings that are estimated to fit."""

import contextlib
import socket
from collections.abc import Iterable, Iterator

import jax

from mpjax.config.choices import AUTO
from mpjax.config.schema import Config, with_settings
from mpjax.errors import UsageError, first_line, is_exhausted
from mpjax.loop.company import Alone, Company
from mpjax.plan.system_memory import free_memory, free_swap


@contextlib.contextmanager
def memory_told(config: Config) -> Iterator[None]:
    """Context that converts an out-of-memory error of a device or the host to a UsageError with settings that may fit.

    To find them, it compiles the step in a few sizes, which may take minutes. Other errors pass unchanged.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_exhausted(error):
            raise
        raise UsageError(
            f"out of memory ({first_line(error).removeprefix('MemoryError: ')}); {_advice(config)}"
        ) from error


def require_memory(company: Alone | Company, programs: Iterable[jax.stages.Compiled]) -> None:
    """Raises MemoryError if the devices are CPUs and a program needs more memory than the host has free, swap included.

    The need is that of the largest program: the bytes of its temporary arrays and results, times the devices of this
    process and the processes on this host. Without this check, the system would kill the process without a message when
    it first writes to the memory. All processes must call it. On other devices it does nothing.

    Args:
      company: the processes, which share the memory of their hosts.
      programs: compiled programs whose arguments are in memory already.
    """
    devices, here = jax.local_devices(), socket.gethostname()
    if devices[0].platform != "cpu":
        return
    processes = company.gather(here).count(here)
    analyses = filter(None, (program.memory_analysis() for program in programs))
    sizes = (of.temp_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes for of in analyses)
    needed = max(sizes, default=0) * len(devices) * processes
    if needed > (free := free_memory() + free_swap()):
        from mpjax.plan.table import size  # local, because no other run needs it

        raise MemoryError(f"the step takes {size(needed)} of the {size(free)} that are free")


def _advice(config: Config) -> str:
    from mpjax.commands.fit import fitted  # local, because few runs need the modules of the plan

    requested = with_settings(config, {"training.accumulate": AUTO, "resume": False})
    try:
        fitted_config, _ = fitted(requested, say=lambda line: None)
    except (UsageError, jax.errors.JaxRuntimeError, MemoryError):
        return (
            f"no number of micro-batches of a batch of {config.data.batch_size} fits by the estimate; write a smaller "
            "--data.batch_size, --training.remat full, or a smaller model"
        )
    count = fitted_config.training.accumulate
    if count > config.training.accumulate:
        return f"write --training.accumulate {count}, with which the step fits by the estimate and learns the same"
    return (
        "by the estimate the step fits into what is free now: end other programs on the device, or write a smaller "
        "--data.eval_batch_size if it was an evaluation"
    )
