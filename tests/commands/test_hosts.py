"""One run over two hosts, each in namespaces of its own: names that mislead, a cable that is pulled, a power cut."""

import pathlib
import sys
import time

import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from hosts import lacking, network
from network_faults import Run, after_an_end, finished, refused, undisturbed


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := lacking():
        pytest.skip(f"needs network namespaces: {reason}")


@pytest.fixture(scope="module")
def expected(possible, tmp_path_factory):
    """The losses of 600 steps that nothing disturbs."""
    return undisturbed(tmp_path_factory.mktemp("runs"), steps=600)


def test_hosts_whose_names_mislead_train_on_ipv6_alone(expected, tmp_path):
    """A host knows its own name as 127.0.1.1, as on Debian; the other as an interface that leads nowhere."""
    with network(2) as joined:
        for host in joined.hosts:
            host.do(f"ip address del {host.address}/24 dev eth0")
        joined.hosts[0].know(host0="127.0.1.1")
        joined.hosts[1].other_network("fd66::1/64")
        joined.hosts[1].know(host1="fd66::1")
        run = Run(joined.hosts, tmp_path / "run", steps=600, coordinator="[fd77::1]:1234")
        run.start(1)
        run.start(0)
        run.reach(1)
        listening = [joined.hosts[number].do("ss -Hltn").split()[3] for number in range(2)]
        row = finished(run, "", expected)
    assert [address.rpartition(":")[0] for address in listening] == ["[fd77::1]", "[fd77::2]"]
    assert (row.outcome, row.same_losses, row.left_behind) == ("trains", True, 0), row


def test_a_cable_that_is_pulled_for_3_seconds_costs_nothing(expected, tmp_path):
    with network(2) as joined:
        run = Run(joined.hosts, tmp_path / "run", steps=600)
        run.start()
        run.reach(100)
        joined.hosts[1].pull()
        time.sleep(3)
        joined.hosts[1].plug()
        row = finished(run, "", expected)
    assert (row.outcome, row.same_losses, row.left_behind) == ("trains", True, 0), row


def test_a_host_that_reboots_ends_the_run_which_goes_on_from_its_checkpoint(expected, tmp_path):
    with network(2) as joined:
        run = Run(joined.hosts, tmp_path / "run", steps=600)
        run.start()
        run.reach(250)
        joined.reboot(1)
        row = after_an_end(run, "", expected, time.monotonic())
    assert (row.outcome, row.same_losses, row.left_behind) == ("ends", True, 0), row
    assert "process 1 has ended without a word" in row.read[0]
    assert row.seconds < 40


def test_process_0_says_where_it_listens_if_its_name_misleads(tmp_path):
    with network(2) as joined:
        joined.hosts[0].other_network("10.66.1.1/24")
        joined.hosts[0].know(host0="10.66.1.1")
        run = Run(joined.hosts, tmp_path / "run", "--distributed.timeout", "8", coordinator="host0:1234")
        run.start()
        row = refused(run, "")
    assert (row.outcome, row.left_behind, set(row.codes.values())) == ("ends", 0, {2}), row
    assert "host0:1234 (host0 is 10.66.1.1 on the host of process 0, which listens there)" in row.read[0]
