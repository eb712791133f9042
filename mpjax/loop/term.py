"""One term of an elastic run: who trains in it, and how their workers have ended."""

import dataclasses


@dataclasses.dataclass
class Term:
    """A time in which the same processes train. Its workers are numbered from 0, in the order of `members`."""

    number: int
    members: tuple[int, ...]
    ended: dict[int, int] = dataclasses.field(default_factory=dict)
    """The exit codes of workers, by the number of their process; negative: killed by this signal."""
    failures: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """What workers said about the error with which they end: their exit code and its message."""
    first: int | None = None
    """The first process whose worker did not end well."""
    cause: int | None = None
    """The process that told of an error before any worker had ended. The others may end before it does."""
    died: set[int] = dataclasses.field(default_factory=set)
    """The processes whose workers were killed or hang."""
    hung: set[int] = dataclasses.field(default_factory=set)
    """Those of them whose workers had not ended when the others said that one is lost."""
    lost: set[int] = dataclasses.field(default_factory=set)
    """The processes that are not connected any more, or do not answer."""
    running: bool = False
    asked: bool = False
    killed: bool = False
    until: float | None = None
    """When the rest is killed, and once it is, when it counts as lost."""

    @property
    def left(self) -> set[int]:
        """The processes whose workers have not ended yet."""
        return set(self.members) - self.ended.keys() - self.lost
