"""When a checkpoint of a run is complete, for Ray. What a worker does in a cluster is tested in test_train_ray.py."""

import threading
import types

import pytest

from mpjax.commands import ray_worker
from mpjax.config import Config


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Reports of a run, and the list of its complete checkpoints."""
    complete = []
    monkeypatch.setattr(ray_worker, "complete_checkpoints", lambda folder: complete)
    return ray_worker.Reports(Config(output_dir=str(tmp_path)), first=True), complete


def waiting_for(reports, position):
    checkpoint, found = types.SimpleNamespace(path=f"/run/checkpoints/{position}"), []
    thread = threading.Thread(target=lambda: found.append(reports._complete(checkpoint, "any")))
    thread.start()
    return thread, found, checkpoint


def test_a_checkpoint_is_reported_once_it_is_complete(reports):
    reports, complete = reports
    complete.append(4)
    thread, found, checkpoint = waiting_for(reports, 8)
    thread.join(0.3)
    assert found == []
    complete.append(8)
    thread.join(10)
    assert found == [checkpoint]


@pytest.mark.parametrize("later", [True, False])
def test_a_checkpoint_that_is_gone_is_not_waited_for(reports, later):
    """A later one has taken its place, or the run has ended without it."""
    reports, complete = reports
    thread, found, checkpoint = waiting_for(reports, 8)
    complete.append(12) if later else reports.close()
    thread.join(10)
    assert found == [checkpoint]
