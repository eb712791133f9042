"""Joins the processes of a run: connects them, starts JAX over all of them, and ends all if one fails."""

import atexit
import contextlib
import hashlib
import importlib.metadata
import pathlib
import time
import warnings
from collections.abc import Iterator

from mpjax.config.save import shared_settings
from mpjax.config.schema import Config
from mpjax.config.user_code import files_of
from mpjax.errors import WARNINGS, Diverged, Interrupted, UsageError, exit_code_of, reason_of
from mpjax.loop.cluster import Seat, seat_of
from mpjax.loop.company import GRACE, SILENCE, Alone, Company
from mpjax.loop.roll_call import call_roll


SILENT = int(2 * SILENCE)
"""Seconds without a heartbeat after which JAX takes a process to be dead; `Company` notices sooner."""

STARTING = 120
"""Seconds that JAX may take to connect processes that `call_roll` has connected."""


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Alone | Company]:
    """Context that connects the processes of the run, and yields their `Company`, or `Alone` for one process.

    Enter it before JAX starts a device. At the end of the `with` block, each process waits for all others. An error
    inside the block passes; the other processes then end too, and this one ends without JAX's shutdown. Only process 0
    shows mpjax's warnings.

    Raises:
      UsageError: a process is missing, cannot be reached, or has other settings or other code; the cluster's variables
        contradict each other; or JAX has already joined processes or started devices.
    """
    seat = seat_of(config.distributed)
    if seat is None:
        yield Alone()
        return
    import jax

    if jax.distributed.is_initialized():
        raise UsageError(
            "JAX has joined several processes already: leave jax.distributed.initialize to the run, and start new "
            "processes for another run"
        )
    lines = call_roll(seat, shared_settings(config) | _code(config), timeout=config.distributed.timeout)
    company = Company(seat.process, seat.processes, lines)
    with warnings.catch_warnings():
        if not company.first:  # process 0 shows them
            for category in WARNINGS:
                warnings.simplefilter("ignore", category)
        try:
            _start_jax(seat)
            yield company
        except Interrupted:  # in all at the same step
            company.disband()
            raise
        except BaseException as error:
            if not isinstance(error, (UsageError, Diverged, KeyboardInterrupt)):
                time.sleep(GRACE)  # a collective fails if another process has died; `company` then reports that
            code = exit_code_of(error)
            company.fail(str(error) or type(error).__name__, code)
            atexit.register(company.end, code)
            raise
        company.disband()


def _start_jax(seat: Seat) -> None:
    """Connects JAX over all processes by `jax.distributed.initialize`, without JAX's own handler of SIGTERM.

    Raises:
      UsageError: JAX runs already, or cannot use the port.
    """
    import jax

    with contextlib.suppress(AttributeError):  # a later JAX may have no such setting
        # Its handler of SIGTERM would take the place of the run's.
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            seat.coordinator,
            seat.processes,
            seat.process,
            local_device_ids=seat.gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=STARTING,
            heartbeat_timeout_seconds=SILENT,
        )
    except RuntimeError as error:
        raise UsageError(
            f"JAX did not start over {seat.processes} processes at {seat.coordinator}: {reason_of(error)}; write "
            "another free port in --distributed.coordinator, and start no device before the run"
        ) from error


PACKAGES = ("mpjax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
"""The packages whose versions decide what is computed and stored."""

NUMERICS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)
"""JAX's settings that decide what is computed."""


def _code(config: Config) -> dict[str, str]:
    """Collects what has to be equal in all processes besides the settings, as text by name.

    These are the versions of `PACKAGES`, JAX's settings (`NUMERICS`), and checksums of mpjax's sources and of each file
    that a setting names as `FILE.py:NAME`.
    """
    import jax

    folder = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    settings = {name: str(getattr(jax.config, name, None)) for name in NUMERICS}
    files = {f"the file of {flag}": _checksum(where) for flag, where in files_of(config).items()}
    return {**versions, **settings, **files, "mpjax's sources": digest.hexdigest()[:12]}


def _checksum(file: pathlib.Path) -> str:
    """The first 12 hexadecimal digits of a file's SHA-256; the system's error message if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return error.strerror or "cannot be read"
