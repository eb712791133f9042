"""The order of the work within a time limit: the important first, everything written at once, failures recorded."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu.cases import Case, Peer, Row, rows_of
from gpu.check import disagreement
from gpu.results import Results
from gpu.worker import Failed, Settings, Worker


SHARES: dict[Peer, float] = {"mpjax": 0.45, "linen": 0.2, "torch": 0.0}
"""Of the device's memory, while all step by turns; PyTorch takes from the rest. A reference, alone, has `ALONE`."""

ALONE = 0.7
OVER = "left out: the time was over"


class Budget:
    """A time limit."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.end = clock() + seconds

    def left(self) -> float:
        """Seconds."""
        return self.end - self.clock()


class Schedule:
    """Runs cases one after the other.

    Args:
      results: where records go.
      budget: of all cases together.
      settings: of the workers.
      start: a peer and its share of memory to a worker.
      rounds: in which all rows of a case take their turn.
      seconds: of a row's turn, about.
    """

    def __init__(
        self,
        results: Results,
        budget: Budget,
        settings: Settings,
        *,
        start: Callable[[Peer, Settings, float], Any] = Worker,
        rounds: int = 9,
        seconds: float = 0.3,
    ):
        self.results, self.budget, self.settings = results, budget, settings
        self.start, self.rounds, self.seconds = start, rounds, seconds
        self.absent: dict[Peer, str] = {}

    def run(self, cases: Sequence[Case], begin: Callable[[dict], None] = lambda found: None) -> None:
        """Describes the machine, then runs every case for its share of the time that is left."""
        begin(self._describe())
        for index, case in enumerate(cases):
            weights = [other.weight for other in cases[index:]]
            self._case(case, self.budget.left() * case.weight / sum(weights))
        self.results.header["finished"] = True
        self.results.write()

    def _describe(self) -> dict:
        with contextlib.closing(self.start("mpjax", self.settings, ALONE)) as worker:
            found = {**worker.ask("describe", seconds=self.budget.left())}
            found["ceilings"] = worker.ask("ceilings", seconds=self.budget.left())
        with contextlib.closing(self.start("torch", self.settings, 0.0)) as worker:
            try:
                found["torch"] = worker.ask("describe", seconds=self.budget.left())
                if found["torch"]["device"] == "cpu" and not self.settings.small:
                    self.absent["torch"] = "PyTorch sees no GPU"
            except Failed as error:
                self.absent["torch"] = str(error)
        self.results.header |= found
        self.results.write()
        return found

    def _case(self, case: Case, seconds: float) -> None:
        rows = rows_of(case)
        # What the rounds will take, steps that are not timed included.
        reserve = 1.5 * self.rounds * self.seconds * len(rows)
        until = self.budget.clock() + seconds - reserve
        peers: list[Peer] = list(dict.fromkeys(row.peer for row in rows))
        self.results.open(case)
        if self.budget.left() < reserve:
            for row in rows:
                self.results.fail(case, row, OVER)
            return
        present: list[Peer] = [peer for peer in peers if peer not in self.absent]
        with contextlib.ExitStack() as opened:

            def start(peer: Peer, share: float) -> Any:
                return opened.enter_context(contextlib.closing(self.start(peer, self.settings, share)))

            # All at once: they import side by side, and take memory only when they are asked something.
            workers: dict[Peer, Any] = {peer: start(peer, SHARES[peer]) for peer in present}
            # Nothing needs as much memory as a reference: its process is gone before a row takes any.
            referees = dict(workers)
            if not self.settings.small:
                referees |= {peer: start(peer, ALONE) for peer in present}
            references = self._references(case, referees)
            ready = self._prepare(case, rows, workers, references, until, reserve)
            self._rounds(case, ready, workers)

    def _references(self, case: Case, referees: dict[Peer, Any]) -> dict[Peer, Any]:
        """By peer: the first step in float32 throughout, or why there is none."""
        found: dict[Peer, Any] = {}
        for peer, worker in referees.items():
            start = self.budget.clock()
            try:
                found[peer] = worker.ask("reference", case, seconds=self.budget.left())
                self.results.reference(case, peer, {**found[peer], "took_seconds": self.budget.clock() - start})
            except Failed as error:
                found[peer] = error
            if not self.settings.small:
                worker.close()
        if isinstance(own := found.get("mpjax"), dict):
            self.results.cases[case.name]["flops"] = own["flops"]
        return found

    def _prepare(
        self,
        case: Case,
        rows: Sequence[Row],
        workers: dict[Peer, Any],
        references: dict[Peer, Any],
        until: float,
        reserve: float,
    ) -> list[Row]:
        """Compiles, checks and first measures each row while there is time; gives those that are right."""
        ready: list[Row] = []
        took: dict[Peer, float] = {}
        for row in rows:
            reference, left = references.get(row.peer), self.budget.left() - reserve / 2
            # A worker that is ended in the middle takes its other rows along.
            over = ready and (self.budget.clock() > until or left < took.get(row.peer, 0.0))
            if row.peer in self.absent:
                self.results.fail(case, row, self.absent[row.peer])
            elif not isinstance(reference, dict):
                self.results.fail(case, row, f"nothing to check it against: {reference}")
            elif over:
                self.results.fail(case, row, OVER)
            else:
                start = self.budget.clock()
                if self._one(case, row, workers[row.peer], reference, left):
                    ready.append(row)
                took[row.peer] = self.budget.clock() - start
        return ready

    def _one(self, case: Case, row: Row, worker: Any, reference: dict, seconds: float) -> bool:
        try:
            start = self.budget.clock()
            found = worker.ask("prepare", case, row, seconds=seconds)
            self.results.record(case, row, **found, took_seconds=self.budget.clock() - start)
            if wrong := disagreement(found["first"], reference, row):
                self.results.fail(case, row, f"wrong: {wrong}")
                worker.ask("drop", row, seconds=self.budget.left())
                return False
            self.results.record(case, row, alone=worker.ask("measure", row, self.seconds, seconds=self.budget.left()))
        except Failed as error:
            self.results.fail(case, row, str(error))
            return False
        return True

    def _rounds(self, case: Case, ready: list[Row], workers: dict[Peer, Any]) -> None:
        """All rows by turns, so that whatever slows the device down slows all of them."""
        times: dict[Row, list[float]] = {row: [] for row in ready}
        for _ in range(self.rounds):
            for row in list(times):
                if self.budget.left() <= 0:
                    return
                try:
                    times[row].append(
                        workers[row.peer].ask("measure", row, self.seconds, seconds=max(1.0, self.budget.left()))
                    )
                except Failed as error:  # what was measured before stays
                    del times[row]
                    self.results.record(case, row, stopped=str(error))
            for row, found in times.items():
                self.results.record(case, row, seconds=list(found))
