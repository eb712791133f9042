"""What can go wrong in a run, as the exit codes of the command line name it."""


class UsageError(ValueError):
    """The user's input is at fault: the message says what it got, what it wanted and what to write. Exit code 2."""


class DtypeError(UsageError, TypeError):
    """Arrays have other dtypes than promised; the message names each by path."""


class Diverged(RuntimeError):
    """Training cannot go on: values stay non-finite at the smallest loss scale. Exit code 3."""


class Interrupted(RuntimeError):
    """A signal ended the run after its checkpoint was saved. Exit code 128 + signal."""

    def __init__(self, message: str, signal_number: int | None):
        super().__init__(message)
        self.signal_number = signal_number or 2


class PrecisionWarning(UserWarning):
    """Advice about precision: the program goes on, but not as well as it could."""


class DataWarning(UserWarning):
    """What a data set holds is taken in a way, or left out, that the user would want to know of."""


class CheckpointWarning(UserWarning):
    """A checkpoint is not what it should be, and another is used, or it is used in another way."""
