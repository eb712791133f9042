"""A step simulated by hand: one second per byte that kernels move."""

from mpjax.plan.events import Start, Wait, Work
from mpjax.plan.hlo import Instruction
from mpjax.plan.timeline import StepTime, simulate


def start(name: str, seconds: int, *, moved: int = 0) -> Start:
    """A collective of one byte per second."""
    instruction = Instruction(name, f"u8[{seconds}]", "all-reduce-start", (), "")
    return Start(name, "all-reduce", (("u8", seconds),), moved, instruction)


def timed(*events) -> StepTime:
    return simulate(events, 1.0, lambda each: float(each.bytes))


def test_a_collective_that_ends_before_it_is_needed_costs_nothing():
    assert timed(Work(2), start("a", 3), Work(4), Wait("a"), Work(1)) == StepTime(3, 0, 7)


def test_what_is_left_of_a_collective_when_it_is_needed_is_exposed():
    """It runs from 2 to 7; the kernels are done at 6."""
    assert timed(Work(2), start("a", 5), Work(4), Wait("a"), Work(1)) == StepTime(5, 1, 8)


def test_collectives_run_one_after_the_other():
    """The first runs from 1 to 5, the second starts at 2 and runs from 5 to 8; kernels are done at 4."""
    events = [Work(1), start("a", 4), Work(1), start("b", 3), Work(2), Wait("a"), Wait("b"), Work(1)]
    assert timed(*events) == StepTime(7, 4, 9)


def test_a_collective_takes_memory_bandwidth_from_the_kernels():
    """It runs from 0 to 3; of the kernels' 4 seconds it reads and writes for 2."""
    assert timed(start("a", 3, moved=2), Work(2), Wait("a")) == StepTime(3, 0, 4)


def test_a_collective_among_no_others_is_left_out():
    assert timed(Work(1), start("a", 0, moved=5), Wait("a")) == StepTime(0, 0, 1)


def test_a_loop_starts_the_same_collective_again():
    once = [start("a", 3), Work(1), Wait("a")]
    assert timed(*once, *once) == StepTime(6, 4, 6)
