"""The secret that the processes of a run show each other before they talk."""

import hmac
import os
import pathlib
from collections.abc import Mapping

from mpjax import strict_json
from mpjax.errors import UsageError


_JOBS = ("SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")


def shared_key(*, detected: bool, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the processes of a run show each other: $MPJAX_SECRET, or the content of $MPJAX_SECRET_FILE.

    Without both it is the number of the scheduler's job in a run whose processes the scheduler has placed (`detected`),
    and else it is empty.

    Raises:
      UsageError: the file cannot be read or is empty.
    """
    if file := environment.get("MPJAX_SECRET_FILE"):
        try:
            content = pathlib.Path(file).read_bytes().strip()
        except OSError as error:
            raise UsageError(f"cannot read $MPJAX_SECRET_FILE, {file}: {error.strerror}") from error
        if not content:
            raise UsageError(f"$MPJAX_SECRET_FILE, {file}, is empty: write a long random text into it")
        return content
    job = next((environment[name] for name in _JOBS if name in environment), "") if detected else ""
    return os.fsencode(environment.get("MPJAX_SECRET", job))  # which need not be UTF-8


def sealed(key: bytes, nonce: str, message: Mapping) -> bytes:
    """Encodes a message as a line, with an HMAC-SHA256 of it and of `nonce`, a text that the other end has chosen."""
    text = strict_json.encode(message)
    return f"{hmac.digest(key, (nonce + text).encode(), 'sha256').hex()} {text}\n".encode()


def opened(key: bytes, nonce: str, line: bytes) -> dict:
    """Decodes a line of `sealed`; ValueError (or RecursionError) if it is none with this key and this nonce."""
    seal, _, text = line.decode().strip().partition(" ")
    if not hmac.compare_digest(seal, hmac.digest(key, (nonce + text).encode(), "sha256").hex()):
        raise ValueError("another secret")
    return strict_json.decode(text)
