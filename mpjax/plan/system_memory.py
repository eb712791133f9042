"""Reads how much memory and swap of this machine are free."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


MEMINFO = pathlib.Path("/proc/meminfo")
GROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def free_memory() -> int:
    """The bytes of memory that this process can still take, on this machine and within its control groups (cgroups).

    The page cache counts as free. If Linux reports neither, as outside of Linux, it is all the memory of the machine.
    """
    lines = _meminfo()
    limits = [*([lines["MemAvailable"]] if "MemAvailable" in lines else []), *_left_of_groups()]
    return min(limits) if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_swap() -> int:
    """The bytes of swap that are free on this machine, whatever control groups allow; 0 outside of Linux."""
    return _meminfo().get("SwapFree", 0)


def _meminfo() -> dict[str, int]:
    """Reads `/proc/meminfo`: bytes by name, such as `MemAvailable`; empty if there is no such file."""
    if not MEMINFO.exists():
        return {}
    lines = (line.split() for line in MEMINFO.read_text(encoding="utf-8").splitlines())
    return {words[0].removesuffix(":"): 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}


_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""The files with the limit and the use of a control group, and a prefix in `memory.stat`: version 2, version 1."""


def _left_of_groups() -> Iterator[int]:
    """Yields, for each control group around this process that has a limit, the bytes that it may still take."""
    for folder in _group_folders():
        for limit, used, prefix in _FILES:
            with contextlib.suppress(OSError, ValueError):  # no limit, or no such file in this version
                most = int((folder / limit).read_text(encoding="utf-8"))  # "max" is no number
                lines = (line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                stat = {name: int(value) for name, value in lines}
                files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield max(0, most - int((folder / used).read_text(encoding="utf-8")) + files)


def _group_folders() -> set[pathlib.Path]:
    """The folders of this process's control groups for memory and of all groups around them; they need not exist."""
    folders = set()
    for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines() if OWN_GROUPS.exists() else []:
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        root = GROUPS / kinds
        # In a container, the path may be the host's, of which only the root exists here.
        group = root / path.lstrip("/")
        folders |= {root, *(folder for folder in (group, *group.parents) if folder.is_relative_to(root))}
    return folders
