"""Where the test suite's time goes: seconds and compiled programs of each test, by cause.

As a pytest plugin it writes one JSON file; as a script it prints what such files hold, as Markdown:

    PYTHONPATH=. pytest -n auto -p benchmarks.suite --costs costs.json
    python benchmarks/suite.py costs.json
"""

import collections
import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
from time import perf_counter  # before a test replaces it

import jax
import pytest


EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
CAUSES = ("trace", "lower", "compile", "process", "sleep", "run")


class Clock:
    """Seconds by cause since the start of this process, no second counted twice."""

    def __init__(self):
        self.totals = collections.Counter()
        self._spans = []  # (cause, start, end), disjoint: a traced function may trace and compile others

    def listen(self):
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: event in EVENTS and self.span(EVENTS[event], seconds)
        )
        jax.monitoring.register_event_listener(
            lambda event, **_: event.endswith("/cache_hits") and self.totals.update(hits=1)
        )
        self._time(subprocess.Popen, "wait", "process")
        self._time(subprocess.Popen, "communicate", "process")
        self._time(time, "sleep", "sleep")

    def span(self, cause, seconds):
        """Adds a span of the main thread that ends now, without what was counted inside it already."""
        if threading.current_thread() is not threading.main_thread():
            return
        end = perf_counter()
        inside = 0.0
        while self._spans and self._spans[-1][0] >= end - seconds:
            start, stop = self._spans.pop()
            inside += stop - start
        self._spans.append((end - seconds, end))
        self.totals[cause] += max(seconds - inside, 0.0)
        self.totals["programs"] += cause == "compile"

    def _time(self, owner, name, cause):
        original = getattr(owner, name)

        def timed(*args, **kwargs):
            start = perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.span(cause, perf_counter() - start)

        setattr(owner, name, timed)

    @contextlib.contextmanager
    def measure(self, item):
        """Adds what happens meanwhile to the test's own costs."""
        before, start, cpu = self.totals.copy(), perf_counter(), time.process_time()
        yield
        spent = {name: value - before[name] for name, value in self.totals.items()}
        spent |= {"seconds": perf_counter() - start, "cpu": time.process_time() - cpu}
        costs = dict(item.user_properties).get("costs")
        if costs is None:
            item.user_properties.append(("costs", costs := {}))
        costs.update({name: costs.get(name, 0) + value for name, value in spent.items()})


CLOCK = Clock()


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="write what each test cost to this JSON file")


def pytest_configure(config):
    if config.getoption("--costs"):
        CLOCK.listen()
        config.pluginmanager.register(_Recorder(config), "costs")


class _Recorder:
    """Measures tests where they run, and collects the figures where they are reported."""

    def __init__(self, config):
        self.file = pathlib.Path(config.getoption("--costs"))
        self.reports = not hasattr(config, "workerinput")
        self.tests, self.start = {}, perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with CLOCK.measure(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        with CLOCK.measure(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        with CLOCK.measure(item):
            return (yield)

    def pytest_runtest_logreport(self, report):
        costs = dict(report.user_properties).get("costs")
        if report.when == "teardown" and costs:
            self.tests[report.nodeid] = {name: round(value, 3) for name, value in costs.items()}

    def pytest_sessionfinish(self):
        if self.reports:
            wall = round(perf_counter() - self.start, 1)
            self.file.write_text(json.dumps({"wall": wall, "tests": self.tests}, indent=0))


def causes_of(costs):
    """Seconds of one test or of many, by cause: what is no other cause is running."""
    known = {cause: costs.get(cause, 0.0) for cause in CAUSES[:-1]}
    return known | {"run": max(costs["seconds"] - sum(known.values()), 0.0)}


def table(tests, name, rows=25):
    """The costliest groups of tests as Markdown, `name(nodeid)` being the group."""
    groups = collections.defaultdict(collections.Counter)
    for nodeid, costs in tests.items():
        groups[name(nodeid)].update({**costs, "tests": 1})
    lines = [f"| | tests | seconds | programs | {' | '.join(CAUSES)} |", "| --- " * (4 + len(CAUSES)) + "|"]
    for group, costs in sorted(groups.items(), key=lambda pair: -pair[1]["seconds"])[:rows]:
        causes = " | ".join(f"{seconds:.0f}" for seconds in causes_of(costs).values())
        programs = costs["programs"] - costs["hits"]
        lines.append(f"| {group} | {costs['tests']} | {costs['seconds']:.0f} | {programs} | {causes} |")
    return "\n".join(lines)


def main():
    for file in sys.argv[1:]:
        found = json.loads(pathlib.Path(file).read_text())
        print(f"## {pathlib.Path(file).stem}: {found['wall']:.0f} s\n")
        print(table(found["tests"], lambda _: "all tests"), end="\n\n")
        print(table(found["tests"], lambda nodeid: nodeid.split("::")[0]), end="\n\n")
        print(table(found["tests"], lambda nodeid: nodeid), end="\n\n")


if __name__ == "__main__":
    main()
