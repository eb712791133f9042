"""Losses in float32, whatever the logits' dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training import (
    correct,
    correct_in_top,
    cross_entropy,
    cross_entropy_over,
    dice_loss,
    intersection_and_union,
    masked_cross_entropy,
    perplexity,
    soft_cross_entropy,
    with_labels,
)


LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]]
LABELS = [0, 2]
HALVES = ["float16", "bfloat16"]


def test_cross_entropy_by_hand():
    losses = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS))
    np.testing.assert_allclose(losses, [0.16984602, 1.0986123], rtol=1e-6)


def test_label_smoothing_by_hand():
    """A tenth of the target is spread over all three classes: 0.9 * nll + 0.1 * mean of the negative log softmax."""
    losses = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), label_smoothing=0.1)
    log_softmax = np.array(LOGITS) - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    expected = [-0.9 * row[label] - 0.1 * row.mean() for row, label in zip(log_softmax, LABELS, strict=True)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_is_float32_and_computed_there(dtype, label_smoothing):
    """Logits of 60000 apart: their difference is beyond float16, where the loss would be inf."""
    logits = jnp.array([[30000.0, -32768.0]], dtype)
    loss = cross_entropy(logits, jnp.array([1]), label_smoothing=label_smoothing)
    exact = float(logits[0, 0].astype(jnp.float32)) + 32768
    assert loss.dtype == jnp.float32
    assert float(loss[0]) == pytest.approx(exact * (1 - label_smoothing / 2), rel=1e-6)


def test_a_sum_over_4096_examples_is_finite():
    logits = jnp.tile(jnp.array([20.0, 0.0], jnp.float16), (4096, 1))
    total = jnp.sum(jax.jit(cross_entropy)(logits, np.ones(4096, np.int32)))
    assert float(total) == pytest.approx(4096 * 20, rel=1e-4)


def test_gradients_reach_half_precision_logits():
    grads = jax.jit(jax.grad(lambda x: jnp.mean(cross_entropy(x, jnp.array(LABELS)))))(jnp.array(LOGITS, jnp.float16))
    assert grads.dtype == jnp.float16
    np.testing.assert_allclose(grads[1].astype(jnp.float32), [1 / 6, 1 / 6, -1 / 3], rtol=1e-3)


def test_correct_is_one_where_the_largest_logit_is_the_labels():
    scores = correct(jnp.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], jnp.float16), jnp.array([1, 1, 0]))
    assert scores.dtype == jnp.float32
    assert scores.tolist() == [1, 0, 0]


# Soft targets


def test_soft_cross_entropy_by_hand():
    """Half of class 0 and half of class 2 costs the mean of both; a whole class what it costs by label."""
    targets = jnp.array([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    losses = soft_cross_entropy(jnp.array(LOGITS), targets)
    np.testing.assert_allclose(losses, [0.16984602 + 1.5, 1.0986123], rtol=1e-6)


def test_a_masked_class_that_is_no_target_costs_nothing():
    logits, targets = jnp.array([[2.0, -jnp.inf, 2.0]]), jnp.array([[0.5, 0.0, 0.5]])
    loss, gradient = jax.value_and_grad(lambda x: soft_cross_entropy(x, targets).sum())(logits)
    assert float(loss) == pytest.approx(0.6931472)
    np.testing.assert_array_equal(gradient, jnp.zeros((1, 3)))
    assert jnp.isnan(soft_cross_entropy(jnp.array([[2.0, jnp.nan, 2.0]]), targets)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_soft_cross_entropy_is_computed_in_float32(dtype):
    logits = jnp.array([[30000.0, -32768.0]], dtype)
    loss = soft_cross_entropy(logits, jnp.array([[0.5, 0.5]], dtype))
    assert loss.dtype == jnp.float32
    assert float(loss[0]) == pytest.approx((float(logits[0, 0].astype(jnp.float32)) + 32768) / 2, rel=1e-6)


# Pixels

PIXELS = jnp.array([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [5.0, -5.0]]])[None]  # [1, 2, 2, 2]
NLL = [[0.126928, 0.693147], [0.313262, 10.0000454]]  # of the classes [[0, 0], [1, 1]]


def test_pixel_cross_entropy_is_the_mean_over_an_examples_pixels():
    loss = cross_entropy_over(PIXELS, jnp.array([[[0, 0], [1, 1]]]))
    np.testing.assert_allclose(loss, [np.mean(NLL)], rtol=1e-5)


def test_ignored_pixels_do_not_count_whatever_their_label():
    loss = cross_entropy_over(PIXELS, jnp.array([[[0, 255], [1, 255]]], jnp.uint8), ignore=255)
    np.testing.assert_allclose(loss, [(0.126928 + 0.313262) / 2], rtol=1e-5)


@pytest.mark.slow
def test_ignored_pixels_have_no_gradient_and_the_others_a_finite_one():
    labels = jnp.array([[[0, 255], [1, 255]]])
    grads = jax.grad(lambda x: cross_entropy_over(x, labels, ignore=255)[0])(PIXELS)
    assert np.asarray(grads)[0, :, 1].tolist() == [[0, 0], [0, 0]]
    assert float(grads[0, 0, 0, 1]) == pytest.approx(0.119203 / 2, rel=1e-5)


@pytest.mark.slow
def test_an_image_of_ignored_pixels_costs_nothing():
    labels = jnp.full((1, 2, 2), 255)
    for loss in (cross_entropy_over, dice_loss):
        value, grads = jax.value_and_grad(lambda x, loss=loss: loss(x, labels, ignore=255)[0])(PIXELS)
        assert float(value) == 0
        assert float(jnp.max(jnp.abs(grads))) == 0


# Dice


def test_dice_loss_by_hand():
    """p of class 1 is 3/4 and 1/4, the classes are 1 and 0: 1 - (2 * 3/4 + 1) / (9/16 + 1/16 + 1 + 1) for each."""
    logits = jnp.log(jnp.array([[[1.0, 3.0], [3.0, 1.0]]]))
    loss = dice_loss(logits, jnp.array([[1, 0]]), smooth=1.0)
    np.testing.assert_allclose(loss, [1 - 2.5 / 2.625], rtol=1e-5)


def test_a_class_that_is_absent_and_not_found_costs_nothing():
    logits = jnp.array([[[50.0, -50.0, -50.0]] * 4])
    labels = jnp.zeros((1, 4), jnp.int32)
    value, grads = jax.jit(jax.value_and_grad(lambda x: dice_loss(x, labels)[0]))(logits)
    assert float(value) == pytest.approx(0, abs=1e-6)
    assert bool(jnp.isfinite(grads).all())


def test_all_wrong_costs_almost_one():
    logits = jnp.broadcast_to(jnp.array([50.0, -50.0]), (1, 64, 64, 2))
    loss = dice_loss(logits, jnp.ones((1, 64, 64), jnp.int32))
    assert float(loss[0]) == pytest.approx(1 - 1 / 4097, rel=1e-6)


def test_ignored_pixels_do_not_count_for_dice():
    logits = jnp.log(jnp.array([[[1.0, 3.0], [3.0, 1.0], [1.0, 99.0]]]))
    loss = dice_loss(logits, jnp.array([[1, 0, 255]]), ignore=255)
    np.testing.assert_allclose(loss, [1 - 2.5 / 2.625], rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_over_512_by_512_pixels_do_not_overflow(dtype):
    """262,144 pixels of one class, each with probability 1/2: float16 ends at 65,504."""
    logits, labels = np.zeros((1, 512, 512, 2), dtype), np.ones((1, 512, 512), np.uint8)
    value, grads = jax.jit(jax.value_and_grad(lambda x: dice_loss(x, labels)[0]))(logits)
    assert value.dtype == jnp.float32
    there, absent = (262144 + 1) / (262144 * 1.25 + 1), 1 / (262144 / 4 + 1)
    assert float(value) == pytest.approx(1 - (there + absent) / 2, rel=1e-5)
    assert np.isfinite(np.asarray(grads, np.float32)).all()


# Scores


def test_top_k_by_hand():
    logits = jnp.array([[0.1, 0.4, 0.3, 0.2]] * 4, jnp.float16)
    labels = jnp.arange(4)
    assert correct_in_top(1, logits, labels).tolist() == [0, 1, 0, 0]
    assert correct_in_top(2, logits, labels).tolist() == [0, 1, 1, 0]
    assert correct_in_top(4, logits, labels).tolist() == [1, 1, 1, 1]
    assert correct_in_top(2, logits, labels).dtype == jnp.float32


def test_top_1_is_correct_also_among_equals():
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.integers(0, 3, (500, 5)), jnp.float32)
    labels = jnp.asarray(random.integers(0, 5, 500), jnp.int32)
    np.testing.assert_array_equal(*jax.jit(lambda *given: (correct_in_top(1, *given), correct(*given)))(logits, labels))


def scores_by_label(logits):
    """Scores the logits [B, K] in every way, each with each of the labels -1 to K, as an array [ways, B, K + 2]."""
    labels = jnp.broadcast_to(jnp.arange(-1, logits.shape[-1] + 1), (len(logits), logits.shape[-1] + 2))
    logits = jnp.broadcast_to(logits[:, None], (*labels.shape, logits.shape[-1]))
    flat, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    tops = [correct_in_top(k, flat, flat_labels) for k in (1, 2, logits.shape[-1], 999)]
    shared, _ = intersection_and_union(flat[:, None], flat_labels[:, None])
    ways = [correct(flat, flat_labels), *tops, jnp.sum(shared, -1), with_labels(0.1, flat, flat_labels)[1]]
    return np.stack([np.asarray(way, np.float32).reshape(labels.shape) for way in ways])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_logits_with_a_nan_or_an_inf_are_never_right(bad, dtype):
    """A run that has diverged would report the share of class 0 as its accuracy."""
    with_bad = [[float(bad) if place in places else place for place in range(3)] for places in ALL_PLACES]
    assert not scores_by_label(jnp.array(with_bad, dtype)).any()
    assert not scores_by_label(jnp.full((1, 3), -jnp.inf, dtype)).any()


ALL_PLACES = [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}]


def test_classes_that_a_mask_excludes_by_minus_inf_leave_the_others_as_they_are():
    accuracy, top_1, top_2, *_ = scores_by_label(jnp.array([[-jnp.inf, 1, 2, -jnp.inf]]))
    assert accuracy.tolist() == top_1.tolist() == [[0, 0, 0, 1, 0, 0]]
    assert top_2.tolist() == [[0, 0, 1, 1, 0, 0]]


def test_a_score_has_no_gradient():
    """A score is computed where the loss is differentiated, and one logit may be NaN."""
    logits = jnp.array([LOGITS[0], [1.0, jnp.nan, 0.0]])
    labels = jnp.array(LABELS)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(correct(x, labels)) + jnp.sum(x[:, 2])))(logits)
    assert grads.tolist() == [[0, 0, 1]] * 2


@pytest.mark.parametrize(
    ("classes", "dtype", "labels"),
    [
        (300, "int32", [-1, -3, 300, -301, 2**31 - 1, -(2**31)]),
        (300, "int8", [-1, -3, -128]),
        (3, "uint32", [300, 2**32 - 1]),
    ],
)
def test_a_label_that_is_no_class_is_never_correct(classes, dtype, labels):
    labels = jnp.array(labels, dtype)
    logits = jnp.broadcast_to(jnp.arange(classes, dtype=jnp.float32), (len(labels), classes))
    for given_logits in (logits, logits[:, ::-1], jnp.zeros_like(logits)):
        found = [correct(given_logits, labels)] + [
            correct_in_top(k, given_logits, labels) for k in (1, 2, classes, 999)
        ]
        np.testing.assert_array_equal(found, np.zeros((5, len(labels))))
        assert jnp.isnan(cross_entropy(given_logits, labels)).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "uint32"])
def test_labels_of_any_dtype_rank_among_equals_by_class(dtype):
    """Of 300 equal logits, class 5 is the sixth, also with labels that cannot hold 300."""
    labels, logits = jnp.array([5], dtype), jnp.zeros((1, 300))
    assert [correct_in_top(k, logits, labels).tolist() for k in (5, 6)] == [[0], [1]]


def test_intersection_and_union_by_hand():
    """Found: 0 0 1 2. There: 0 1 1 1, and then a pixel that is ignored."""
    logits = jax.nn.one_hot(jnp.array([[0, 0, 1, 2, 2]]), 4)
    shared, either = intersection_and_union(logits, jnp.array([[0, 1, 1, 1, 255]], jnp.uint8), ignore=255)
    assert (shared.dtype, either.dtype) == (jnp.float32, jnp.float32)
    assert shared.tolist() == [[1, 1, 0, 0]]
    assert either.tolist() == [[2, 3, 1, 0]]


@pytest.mark.parametrize("dtype", HALVES)
def test_pixels_are_counted_exactly_in_float32(dtype):
    """262,145 would be 262,144 in bfloat16 and inf in float16."""
    logits = jnp.zeros((2, 262145, 2), dtype)
    shared, either = jax.jit(intersection_and_union)(logits, np.zeros((2, 262145), np.int32))
    assert shared.tolist() == either.tolist() == [[262145, 0]] * 2


# Tokens


def test_token_cross_entropy_sums_and_counts_what_the_mask_keeps():
    mask = jnp.array([[[1, 0], [1, 0]]], bool)
    total, count = masked_cross_entropy(PIXELS, jnp.array([[[0, -100], [1, 7]]]), mask)
    assert (total.dtype, count.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(total, [0.126928 + 0.313262], rtol=1e-5)
    assert count.tolist() == [2]


def test_a_sum_over_4096_tokens_is_finite_and_float32():
    logits = jnp.tile(jnp.array([20.0, 0.0], jnp.float16), (2, 4096, 1))
    total, count = jax.jit(masked_cross_entropy)(logits, np.ones((2, 4096), np.int32), np.ones((2, 4096), np.float32))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, [4096 * 20] * 2, rtol=1e-4)
    assert count.tolist() == [4096, 4096]


def test_perplexity_of_a_guess_among_50_tokens_is_50():
    logits = jnp.zeros((1, 7, 50), jnp.bfloat16)
    total, count = jax.jit(masked_cross_entropy)(logits, np.arange(7)[None], np.ones((1, 7), np.int32))
    np.testing.assert_allclose(perplexity(total, count), [50], rtol=1e-5)
    assert perplexity(jnp.zeros(1), jnp.zeros(1)).tolist() == [1]
