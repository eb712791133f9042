"""Pretrained weights in the storage dtype, a row for each variable, and refusals that leave the model alone."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.models.pretrained import variables_of


def arrays_of(model):
    return {name: np.asarray(variable.get_value()) for name, variable in variables_of(model).items()}


def assert_untouched(model):
    fresh = type(model)(rngs=nnx.Rngs(0))
    jax.tree.map(np.testing.assert_array_equal, arrays_of(model), arrays_of(fresh))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16"])
def test_weights_of_any_dtype_become_the_policys_storage_dtype(small, weights, saved, dtype, policy):
    path = saved({name: array.astype(dtype) for name, array in weights.items()})
    report = mpjax.load_pretrained(small, path, policy=policy)
    got = arrays_of(small)
    np.testing.assert_array_equal(got["stem/kernel"].astype(np.float32), [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(got["norm/var"], [2, 4])
    assert {name: str(array.dtype) for name, array in got.items() if "norm" not in name} == {
        "stem/kernel": policy,
        "stem/bias": policy,
        "head/kernel": policy,
    }
    assert got["norm/mean"].dtype == got["norm/var"].dtype == np.float32
    rows = {row.path: row for row in report}
    assert rows["head/kernel"] == ("head/kernel", "head.kernel", (2, 4), dtype, np.dtype(policy), 0, 0, 0.0)
    assert len(report) == 7


def test_rules_decide_which_module_stays_in_float32(small, weights, saved):
    mpjax.load_pretrained(small, saved(weights), policy="bfloat16;head=float32")
    dtypes = {name: str(array.dtype) for name, array in arrays_of(small).items()}
    assert (dtypes["head/kernel"], dtypes["stem/kernel"]) == ("float32", "bfloat16")


def test_without_a_policy_each_parameter_keeps_the_dtype_that_it_has(small, weights, saved):
    mpjax.apply_policy(small, "params=float16,compute=float16;head=float32")
    mpjax.load_pretrained(small, saved(weights))
    dtypes = {name: str(array.dtype) for name, array in arrays_of(small).items()}
    assert (dtypes["head/kernel"], dtypes["stem/kernel"], dtypes["norm/mean"]) == ("float32", "float16", "float32")
    assert small.stem.bias.get_value().tolist() == [0.5, -0.5]


def test_a_model_that_was_only_shaped_gets_its_arrays_from_the_file(small, weights, saved):
    abstract = nnx.eval_shape(lambda: type(small)(rngs=nnx.Rngs(0)))
    mpjax.load_pretrained(abstract, saved(weights), policy="bfloat16")
    assert isinstance(abstract.stem.kernel.get_value(), jax.Array)
    assert abstract.head.kernel.get_value().dtype == jnp.bfloat16


def test_the_report_counts_what_overflows_what_flushes_and_how_far_the_rest_is_rounded(small, weights, saved):
    weights["stem.kernel"] = np.array([[70000, -1e6], [1e-9, 1], [1.0003, 0]], np.float32)
    report = mpjax.load_pretrained(small, saved(weights), policy="float16", allow_lossy=True)
    row = next(row for row in report if row.path == "stem/kernel")
    assert (row.overflow, row.flushed) == (2, 1)
    assert row.error == pytest.approx(3.0e-4, rel=0.01)  # 1.0003 becomes 1
    assert (report.overflow, report.flushed, report.error) == (2, 1, row.error)
    assert small.stem.kernel.get_value().tolist() == [[np.inf, -np.inf], [0, 1], [1, 0]]


def test_a_lossy_conversion_is_refused_by_name_with_what_to_write(small, weights, saved):
    weights["stem.kernel"][:2] = [[70000, -1e6], [1e-9, 1]]
    weights["head.kernel"][0, 0] = 1e-9
    with pytest.raises(UsageError) as raised:
        mpjax.load_pretrained(small, saved(weights), policy="float16")
    assert str(raised.value).splitlines() == [
        "values that the stored dtype cannot hold (nothing was loaded):",
        "  head.kernel (head/kernel): of 8 values in float32, 0 overflow and 1 flush to zero in float16",
        "  stem.kernel (stem/kernel): of 6 values in float32, 2 overflow and 1 flush to zero in float16",
        "keep the module in float32 with a rule: on the command line --precision.rules 'head' float32, in Python "
        "Policy(..., rules={'head': 'float32'}); in Python allow_lossy=True accepts the loss instead",
    ]
    assert_untouched(small)


def test_the_rule_that_the_refusal_proposes_is_enough(small, weights, saved):
    weights["stem.kernel"][0, 0] = 70000
    mpjax.load_pretrained(small, saved(weights), policy="float16;stem=float32")
    assert small.stem.kernel.get_value()[0, 0] == 70000


def test_rounding_alone_is_no_loss(small, weights, saved):
    weights["stem.kernel"][0, 0] = 1.001
    report = mpjax.load_pretrained(small, saved(weights), policy="bfloat16")
    assert report.error == pytest.approx(0.001 / 1.001, rel=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("allow_lossy", [False, True])
def test_what_is_not_finite_in_the_file_is_refused_by_name(small, weights, saved, bad, allow_lossy):
    weights["norm.mean"][1] = bad
    with pytest.raises(UsageError, match=r"norm.mean \(norm/mean\): 1 of 2 values are NaN or inf in the file"):
        mpjax.load_pretrained(small, saved(weights), allow_lossy=allow_lossy)
    assert_untouched(small)


def test_missing_unexpected_and_misshaped_keys_are_listed_together(small, weights, saved):
    weights["head.kernal"] = weights.pop("head.kernel")
    weights["stem.bias"] = np.zeros(5, np.float32)
    weights["norm.var"] = weights["norm.var"].astype(np.int8)
    with pytest.raises(UsageError) as raised:
        mpjax.load_pretrained(small, saved(weights))
    assert str(raised.value).splitlines() == [
        "the file does not fit the model (read in the mpjax layout; nothing was loaded):",
        "  missing: head.kernel (head/kernel); nearest: head.kernal",
        "  unexpected: head.kernal; nearest: head.kernel",
        "  shape: stem.bias is (5,), wanted (2,) (stem/bias)",
        "  dtype: norm.var is int8, wanted one of float64, float32, float16, bfloat16 (norm/var)",
    ]
    assert_untouched(small)


def test_skipped_parameters_keep_their_initial_values_and_the_report_says_so(small, weights, saved):
    before = small.head.kernel.get_value()
    weights["head.kernel"] = np.zeros((2, 1000), np.float32)  # of another number of classes
    report = mpjax.load_pretrained(small, saved(weights), skip=("head/*",))
    np.testing.assert_array_equal(small.head.kernel.get_value(), before)
    assert small.stem.bias.get_value().tolist() == [0.5, -0.5]
    assert report.skipped == ("head/kernel",)
    assert report.ignored == ("head.kernel",)
    assert "left at initial values: head/kernel" in str(report)


def test_a_file_without_a_head_is_enough_where_the_head_is_skipped(small, weights, saved):
    del weights["head.kernel"]
    assert mpjax.load_pretrained(small, saved(weights), skip=("head/*",)).skipped == ("head/kernel",)


def test_keys_that_only_the_file_has_can_be_left_unread(small, weights, saved):
    report = mpjax.load_pretrained(small, saved({**weights, "ema.step": np.zeros(1)}), skip=("ema.*",))
    assert (report.ignored, report.skipped) == (("ema.step",), ())


def test_arrays_stay_on_the_devices_where_they_were(small, weights, saved):
    mesh = jax.make_mesh((2,), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(small, jax.device_put(nnx.state(small, nnx.Param), replicated))
    mpjax.load_pretrained(small, saved(weights))
    assert small.stem.kernel.get_value().sharding == replicated


def test_something_that_is_no_model_is_refused(saved, weights):
    with pytest.raises(UsageError, match="load_pretrained takes a Flax NNX module, got dict"):
        mpjax.load_pretrained({}, saved(weights))
