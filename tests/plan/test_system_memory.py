"""How much memory is free here."""

import pytest

from mpjax.plan import free_memory, free_swap, system_memory


MEMINFO = "MemTotal:  9 kB\nMemAvailable:      4 kB\nSwapFree: 2 kB\nHugePages_Total: 0\n"
TWO = {"memory.max": "3000", "memory.current": "1000"}
ROOM = TWO | {"memory.max": "9000"}
ONE = {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}
FILES = "anon 1\ninactive_file 300\nactive_file 100\ntotal_inactive_file 600\ntotal_active_file 200"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that makes a host with this in the files of control groups."""
    monkeypatch.setattr(system_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(system_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(system_memory, "GROUPS", tmp_path / "groups")

    def made(own, groups):
        (tmp_path / "meminfo").write_text(MEMINFO)
        (tmp_path / "own").write_text(own)
        for place, files in groups.items():
            folder = tmp_path / "groups" / place
            folder.mkdir(parents=True)
            for name, text in ({"memory.stat": "anon 1"} | files).items():
                (folder / name).write_text(f"{text}\n")

    return made


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        ("0::/\n", {}, 4096),
        ("0::/\n", {"": TWO}, 2000),
        ("0::/\n", {"": TWO | {"memory.max": "max"}}, 4096),
        ("0::/\n", {"": TWO | {"memory.max": "500"}}, 0),
        ("0::/\n", {"": TWO | {"memory.stat": FILES}}, 2400),
        ("0::/job/step\n", {"": TWO | {"memory.max": "max"}, "job": TWO, "job/step": ROOM}, 2000),
        ("0::/of/the/host\n", {"": TWO}, 2000),
        ("0::/job\n", {"other": TWO}, 4096),
        ("4:memory:/job\n0::/\n", {"memory/job": ONE}, 2000),
        ("4:memory:/job\n0::/\n", {"memory/job": ONE | {"memory.stat": FILES}}, 2800),
        ("4:memory:/\n", {"memory": ONE | {"memory.limit_in_bytes": "9223372036854771712"}}, 4096),
        ("4:cpuset:/job\n", {"memory/job": ONE}, 4096),
    ],
)  # fmt: skip
def test_free_memory_is_at_most_what_control_groups_leave(host, own, groups, free):
    host(own, groups)
    assert free_memory() == free
    assert free_swap() == 2048


def test_elsewhere_it_is_the_memory_of_the_machine(host):
    assert free_memory() > 2**28
    assert free_swap() == 0
