"""Joins the processes of a run: all enter, JAX starts over all of them, and all end if one fails."""

import atexit
import contextlib
import hashlib
import importlib.metadata
import pathlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping

from mpjax.config.save import shared_settings
from mpjax.config.schema import Config
from mpjax.config.user_code import files_of
from mpjax.errors import WARNINGS, Diverged, Interrupted, UsageError, exit_code_of, reason_of
from mpjax.loop.cluster import Seat, seat_of
from mpjax.loop.company import GRACE, SILENCE, Alone, Company
from mpjax.loop.secret import shared_key


STARTING = 120
"""Seconds that JAX may take to connect processes that are all there."""

SILENT = int(2 * SILENCE)
"""Seconds without a heartbeat after which JAX takes a process to be dead; `Company` notices sooner."""


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
    company = Company(seat.process, seat.processes)
    about, key = (
        shared_settings(config) | code_of_process(config),
        shared_key(detected=not config.distributed.processes),
    )
    # The path of a socket may have a hundred characters.
    folder = tempfile.mkdtemp(prefix="mpjax-", dir=None if len(tempfile.gettempdir()) < 70 else "/tmp")
    try:
        address = enter(company, seat, about, key, f"{folder}/jax", timeout=config.distributed.timeout)
        start_jax(company, seat, f"{folder}/jax", address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # all are connected
    with warnings.catch_warnings():
        if not company.first:  # process 0 shows them
            for category in WARNINGS:
                warnings.simplefilter("ignore", category)
        try:
            yield company
        except Interrupted:  # in all at the same step
            company.disband()
            raise
        except BaseException as raised:
            error = _unreachable(raised, address) or raised
            if not isinstance(error, (UsageError, Diverged, KeyboardInterrupt)):
                time.sleep(GRACE)  # a collective fails if another process has died; `company` then reports that
            code = exit_code_of(error)
            company.fail(str(error) or type(error).__name__, code)
            atexit.register(company.end, code)
            if error is raised:
                raise
            raise error from raised
        company.disband()


def _unreachable(error: BaseException, address: str) -> UsageError | None:
    """The error of a run whose CPUs could not connect to each other; None if `error` is another."""
    if "Gloo context initialization failed" not in str(error):
        return None
    return UsageError(
        f"the processes reach process 0, but not each other: this one listens at {address}, at a port that the system "
        f"chooses, as CPUs do to exchange sums; open all ports between the hosts ({reason_of(error)})"
    )


def enter(company: Company, seat: Seat, about: Mapping[str, str], key: bytes, path: str, *, timeout: float) -> str:
    """Waits until all processes have entered; then the Unix socket `path` leads to JAX's service in process 0.

    Returns the address of this machine at which the others reach it, as far as the connections to process 0 tell.

    Process 0 listens at the port of `seat.coordinator`, and the others try to reach it, until the time is over.

    Args:
      company: what is told of broken connections, by `lost`.
      seat: which process this is, and the address of process 0.
      about: values that have to be equal in all processes, by name.
      key: the secret of the run.
      path: where nothing is yet, in a folder of this user alone. In process 0, the service has to listen there.
      timeout: the seconds to wait for the others.

    Raises:
      UsageError: processes are missing or differ (in all that have entered), or process 0 cannot be reached, cannot
        listen, or refuses this process (in this one).
    """
    from mpjax.loop.door import Door, open_at  # only runs of several processes need these
    from mpjax.loop.port import connect, listen

    ends = time.monotonic() + timeout
    if seat.process == 0:
        listener = listen(seat)
        here = str(listener.getsockname()[0])
        door = Door(listener, seat, about, key, company.lost)
        company.inside = door.inside
        while len(door.abouts) < seat.processes and time.monotonic() < ends:
            time.sleep(0.02)
        values = dict(sorted(door.abouts.items()))
        missing = sorted(set(range(seat.processes)) - values.keys())
        fault = _absence(missing, seat, timeout, here) if missing else difference(values)
        door.verdict = fault, path
        for process in values.keys() - door.abouts.keys():
            company.lost(process)  # meanwhile
        if fault:
            raise UsageError(fault)
        return door.address
    connection, address = connect(
        seat,
        about,
        key,
        timeout=timeout,
        answer=timeout + 5,  # process 0 may have started later, and waits as long for the others
        stranger="what listens there is not process 0 of this run, has another secret, or has ended",
    )
    open_at(path, connection, company.lost)
    return address


def _absence(missing: list[int], seat: Seat, timeout: float, here: str) -> str:
    which = f"process {missing[0]}" if len(missing) == 1 else f"processes {numbers(missing)}"
    name = seat.coordinator.rpartition(":")[0].strip("[]")
    named = (
        "" if here in (name, "::", "0.0.0.0") else f" ({name} is {here} on the host of process 0, which listens there)"
    )
    return (
        f"{which} of {seat.processes} did not come within {timeout:g} seconds: see what they printed, start them with "
        f"--distributed.coordinator {seat.coordinator}{named}, or wait longer with --distributed.timeout"
    )


def difference(values: Mapping[int, Mapping[str, str]]) -> str:
    """Formats the values that differ between processes as a message, the first 20 by name; "" if all agree.

    `values` has the values of each process, by number of process and name.
    """
    lines = []
    for name in sorted(set().union(*values.values())):
        who_says = by_value({process: values[process].get(name, "not there") for process in values})
        if len(who_says) > 1:
            lines.append(f"  {name}: " + ", ".join(f"{v} on process {numbers(who)}" for v, who in who_says.items()))
    if not lines:
        return ""
    shown = "\n".join(lines[:20] + ([f"  and {len(lines) - 20} more"] if lines[20:] else []))
    return f"the processes differ, and have to be started with the same settings and code:\n{shown}"


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Groups the keys of a dict (numbers of processes) by their values, in order.

    >>> by_value({0: "a", 1: "b", 2: "a"})
    {'a': [0, 2], 'b': [1]}
    """
    processes_of: dict[str, list[int]] = {}
    for process, value in values.items():
        processes_of.setdefault(value, []).append(process)
    return processes_of


def numbers(which: list[int]) -> str:
    """Formats ascending numbers as text, three or more in a row as a range.

    >>> numbers([0, 2, 3, 4, 7])
    '0, 2-4, 7'
    """
    groups: list[list[int]] = []
    for number in which:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups)


def start_jax(company: Company, seat: Seat, path: str, address: str) -> None:
    """Connects JAX over all processes by `jax.distributed.initialize`, without JAX's own handler of SIGTERM.

    CPUs exchange sums at `address`. JAX would look up the name of the machine, which may be unknown, of the loopback
    (Debian), or of a network that the others do not reach.

    Raises:
      UsageError: JAX runs already.
    """
    import jax

    from mpjax.jax_internals import distributed_client, exchange_on_cpus_at

    with contextlib.suppress(AttributeError):  # a later JAX may have no such setting
        # Its handler of SIGTERM would take the place of the run's.
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            f"unix:{path}",
            seat.processes,
            seat.process,
            local_device_ids=seat.gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=STARTING,
            heartbeat_timeout_seconds=SILENT,
            coordinator_bind_address=f"unix:{path}",
        )
        exchange_on_cpus_at(address)
    except RuntimeError as error:
        atexit.register(company.end, 2)  # before JAX's shutdown, which would wait
        raise UsageError(
            f"JAX did not start over {seat.processes} processes: {reason_of(error)}; start no device before the run"
        ) from error
    company.begin(distributed_client())


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


def code_of_process(config: Config) -> dict[str, str]:
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
