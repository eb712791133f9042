"""Tuning with timings given: what is timed how often, and when rules are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands.learner import make_task
from mpjax.config import Config
from mpjax.config.schema import Model, Precision
from mpjax.data import labelled_images
from mpjax.training.precision_plan import plan_precision
from mpjax.training.tuning.products import products_of
from mpjax.training.tuning.timing import Timing
from mpjax.training.tuning.tune_products import tune


@functools.cache
def task_and_products():
    plan = plan_precision(Precision(policy="mixed_bfloat16"))
    config = dataclasses.replace(Config(), model=Model(name="mlp", width=3, depth=3))
    task = make_task(config, plan, labelled_images(3, (3, 1, 1)))
    batch = {"image": jax.ShapeDtypeStruct((2, 3, 1, 1), jnp.uint8), "label": jax.ShapeDtypeStruct((2,), jnp.int32)}
    return task, products_of(task, plan.policy, batch)


def tuned(slow, step):
    """With layers of some input widths slower in half precision, and a step that takes so long without and with."""
    task, products = task_and_products()
    seen = []

    def side_by_side(half, full):
        assert jax.tree.leaves(half())[0].shape == jax.tree.leaves(full())[0].shape == (2, 3)
        seen.append(half)
        return Timing((2.0,) * 4 if len(seen) in slow else (1.0,) * 4, (1.0,) * 4)

    asked = []

    def time_step(rules):
        asked.append(rules)
        return Timing((step[0],) * 4, (step[1],) * 4)

    return tune(task, products, time_step, side_by_side), len(seen), asked


def test_each_kind_is_timed_once():
    """Four layers from three to three values, of which the first is behind another cast."""
    found, times, _ = tuned(slow=(), step=(1, 1))
    assert times == len(found.timed) == 1
    assert found.timed[0].modules == ("layers/0", "layers/1", "layers/2", "head")


def test_rules_that_make_the_step_faster_are_kept_with_the_gain():
    found, _, asked = tuned(slow=(1,), step=(0.030, 0.024))
    assert found.rules == found.proposed == asked[0]
    assert set(found.rules) == {"layers/0", "layers/1", "layers/2", "head"}
    assert str(found) == (
        "1 of 1 kinds of products are slower in half precision; rules keep 'head', 'layers/0', 'layers/1', 'layers/2' "
        "in float32: a step is 1.25 times as fast (30 ms to 24 ms)"
    )


def test_rules_that_do_not_are_not_and_that_is_said():
    found, _, asked = tuned(slow=(1,), step=(0.030, 0.0299))
    assert (found.rules, len(asked)) == ({}, 1)
    assert "but with 'head', " in str(found)
    assert str(found).endswith("in float32 a step is no faster (30 ms without, 29.9 ms with): no rules")


def test_nothing_slower_needs_no_step():
    found, _, asked = tuned(slow=(), step=(1, 1))
    assert (found.rules, found.step, asked) == ({}, None, [])
    assert str(found) == "0 of 1 kinds of products are slower in half precision: no rules"


@pytest.mark.parametrize("noisy", [(9.0, 9.0, 1.0, 1.0), (1.05, 1.05, 1.05, 1.0)])
def test_a_step_that_is_sometimes_slower_is_no_reason(noisy):
    task, products = task_and_products()
    slow = Timing((2.0,) * 4, (1.0,) * 4)
    found = tune(task, products, lambda rules: Timing(noisy, (1.0,) * 4), lambda half, full: slow)
    assert found.rules == ({} if noisy[0] == 9.0 else found.proposed)
