"""Joining: alone nothing happens; runs over several processes are in tests/commands/test_processes.py."""

import socket
import warnings

import pytest

from mpjax.config import Config, Distributed
from mpjax.errors import UsageError
from mpjax.loop import joined


def test_alone_nothing_is_started_and_warnings_stay():
    before = warnings.filters[:]
    with joined(Config()) as company:
        assert (company.first, company.processes) == (True, 1)
        assert warnings.filters == before


def test_a_process_that_joined_before_is_told(monkeypatch):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    config = Config(distributed=Distributed(coordinator="127.0.0.1:1", processes=2, process=1))
    with pytest.raises(UsageError, match="start new processes for another run"), joined(config):
        pass


def test_nothing_is_started_before_all_are_there():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    config = Config(distributed=Distributed(coordinator=f"127.0.0.1:{port}", processes=2, process=0, timeout=0.1))
    with pytest.raises(UsageError, match="process 1 of 2 did not come within 0.1 seconds"), joined(config):
        pass
