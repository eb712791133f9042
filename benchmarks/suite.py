"""Where the test suite's time goes: seconds and compiled programs of each test, by cause.

As a pytest plugin it writes one JSON file; as a script it prints what such files hold, as Markdown:

    PYTHONPATH=. pytest -n auto -p benchmarks.suite --costs costs.json
    python benchmarks/suite.py costs.json
    python benchmarks/suite.py --most 0 --output benchmarks/results/suite_cpu.json quick.json slow.json
"""

import argparse
import collections
import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
from time import perf_counter  # before a test replaces it

import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parent))


EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
PACKAGES = ("orbax", "grain", "tyro", "pytest")
CAUSES = ("trace", "lower", "compile", "process", "sleep", "run")


class Clock:
    """Seconds by cause since the start of this process, no second counted twice."""

    def __init__(self):
        self.totals: dict[str, float] = collections.defaultdict(float)
        self._spans = []  # (cause, start, end), disjoint: a traced function may trace and compile others

    def listen(self):
        import jax  # after the suite's conftest.py, whose variables it reads when it is imported

        jax.monitoring.register_event_duration_secs_listener(self._compiling)
        jax.monitoring.register_event_listener(self._found)
        self._time(subprocess.Popen, "wait", "process")
        self._time(subprocess.Popen, "communicate", "process")
        self._time(time, "sleep", "sleep")

    def _compiling(self, event: str, duration_secs: float, **_):
        if event in EVENTS:
            self.span(EVENTS[event], duration_secs)

    def _found(self, event: str, **_):
        self.totals["hits"] += event.endswith("/cache_hits")

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
        before, start, cpu = dict(self.totals), perf_counter(), time.process_time()
        yield
        spent = {name: value - before.get(name, 0.0) for name, value in self.totals.items()}
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
        self.tests, self.start, self.outcomes = {}, perf_counter(), collections.Counter()

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
        if report.when == "call" or report.outcome != "passed":  # a test that is skipped has no call
            self.outcomes[report.outcome] += 1
        if report.when == "teardown" and costs:
            self.tests[report.nodeid] = {name: round(value, 3) for name, value in costs.items()}

    def pytest_sessionfinish(self):
        if self.reports:
            from machine import describe

            wall = round(perf_counter() - self.start, 1)
            found = {"where": describe(*PACKAGES), "outcomes": self.outcomes, "wall": wall, "tests": self.tests}
            self.file.write_text(json.dumps(found, indent=0))


def causes_of(costs):
    """Seconds of one test or of many, by cause: what is no other cause is running."""
    known = {cause: costs.get(cause, 0.0) for cause in CAUSES[:-1]}
    return known | {"run": max(costs["seconds"] - sum(known.values()), 0.0)}


def summary(found):
    """What one run of tests cost: seconds by the clock, and of all workers together by cause; programs compiled."""
    total = collections.Counter()
    for costs in found["tests"].values():
        total.update(costs)
    where = found.get("where", {})
    return {
        **{name: where[name] for name in ("python", "versions", "date") if where},
        **found.get("outcomes", {}),
        "tests": len(found["tests"]),
        "wall": found["wall"],
        "cpu": round(total["cpu"]),
        "programs": round(total["programs"] - total["hits"]),
        **{cause: round(seconds) for cause, seconds in causes_of(total).items()},
    }


def table_of(rings):
    """Runs of tests side by side, as Markdown."""
    lines = [f"| | tests | by the clock | programs | {' | '.join(CAUSES)} |", "| --- " * (4 + len(CAUSES)) + "|"]
    for name, ring in rings.items():
        clock = f"{ring['wall'] // 60:.0f} min {ring['wall'] % 60:.0f} s"
        causes = " | ".join(f"{ring[cause]:,}" for cause in CAUSES)
        lines.append(f"| {name} | {ring['tests']:,} | {clock} | {ring['programs']:,} | {causes} |")
    return "\n".join(lines)


def groups(tests, name, most):
    """The costliest groups of tests, `name(nodeid)` being the group: summaries by name."""
    members = collections.defaultdict(dict)
    for nodeid, costs in tests.items():
        members[name(nodeid)][nodeid] = costs
    seconds = {group: sum(c["seconds"] for c in costs.values()) for group, costs in members.items()}
    ranked = sorted(members, key=lambda group: -seconds[group])[:most]
    return {group: summary({"wall": seconds[group], "tests": members[group]}) for group in ranked}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="what --costs wrote; NAME.json is called NAME")
    parser.add_argument("--most", type=int, default=25, help="how many files and tests to list")
    parser.add_argument("--output", type=pathlib.Path, help="write the first table's figures to this JSON file")
    arguments = parser.parse_args()
    runs = {file.stem.replace("_", " "): json.loads(file.read_text()) for file in arguments.files}
    rings = {name: summary(found) for name, found in runs.items()}
    print(table_of(rings))
    for found in runs.values() if arguments.most else ():
        print("", table_of(groups(found["tests"], lambda nodeid: nodeid.split("::")[0], arguments.most)), sep="\n")
        print("", table_of(groups(found["tests"], lambda nodeid: nodeid, arguments.most)), sep="\n")
    if arguments.output:
        from machine import describe

        machine = {name: value for name, value in describe().items() if name in ("cores", "processor")}
        arguments.output.write_text(json.dumps({**machine, "rings": rings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
