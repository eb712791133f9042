"""What tests of plans share: a skip where nothing compiles for CUDA, and one small run to plan."""

import pytest

from mpjax.config import Config, load
from mpjax.errors import UsageError
from mpjax.plan.estimate import Estimate, Roofline
from mpjax.plan.measure import Measured
from mpjax.plan.memory import Fit, Memory
from mpjax.plan.target import require_plugin
from mpjax.plan.traffic import Traffic


SMALL = "--data.name synthetic:8x8x1:10 --data.batch_size 24 --model.name mlp --model.width 16 --steps 100"


def pytest_collection_modifyitems(items):
    """Puts tests that compile for CUDA where those are that need packages of an extra."""
    for item in items:
        if "plugin" in getattr(item, "fixturenames", ()):
            item.add_marker("extra")


@pytest.fixture(scope="session")
def plugin() -> None:
    """Skips the test where the packages of the extra `plan` are not installed."""
    try:
        require_plugin()
    except UsageError as error:
        pytest.skip(f"pip install -e '.[plan]': {error}")


@pytest.fixture
def small() -> Config:
    """An MLP that compiles in a second."""
    return load(SMALL.split())


@pytest.fixture
def plan_of():
    """Makes plans of round numbers, for what shows them."""

    def make(policy: str = "float32", gpu="h100", *, measured: bool = False) -> Estimate:
        half = policy != "float32"
        return Estimate(
            gpu=gpu,
            policy=policy,
            batch=100,
            devices=4,
            attention="cudnn" if half else "xla",
            memory=Memory(1_000_000_000, 2_000_000_000, 0, 500_000_000, 40_000_000_000 // (1 + half), 0),
            limit=40_000_000_000,
            traffic=Traffic(8_000_000_000 // (1 + half), 321, 1_000_000, {"all-reduce": {"f32": 1_000_000_000}}, {}),
            flops={"bfloat16" if half else "tensorfloat32": 3e12},
            roofline=Roofline(compute=0.002, traffic=0.008 / (1 + half)),
            fit=Fit(150 * (1 + half), compiled=False),
            measured=Measured(0.01, (0.009, 0.011), 46_000_000_000, "NVIDIA H100 80GB HBM3") if measured else None,
        )

    return make
