"""The examples of one's own data set, weights and model: what they print is so, and what they train has learnt."""

import importlib.util
import pathlib

import numpy as np
import pytest

from mpjax.config import load_function


EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def own_dataset():
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    return example("own_dataset").main()


@pytest.fixture(scope="module")
def fine_tune():
    return example("fine_tune").main()


@pytest.fixture(scope="module")
def own_model():
    return example("own_model").main()


@pytest.mark.extra
@pytest.mark.optimized
class TestOwnDataset:
    def test_the_careless_function_is_refused_with_the_column_the_dtype_and_the_line_to_write(self, own_dataset):
        file = EXAMPLES / "own_dataset.py"
        assert own_dataset.refusal.startswith(
            f"image (column 'scan' after {file}:careless): dtype int64; wanted uint8 "
        )
        assert own_dataset.refusal.endswith(
            "write image.astype(np.uint8) or image.astype(np.float32) / largest_value in the function of "
            "--data.preprocess"
        )

    def test_it_learns_from_what_the_other_function_gives(self, own_dataset):
        assert own_dataset.summary["policy"] == "params=float32,compute=float16,output=float32"
        assert own_dataset.summary["test/accuracy"] > 0.9


@pytest.mark.extra
def test_ink_is_float32_in_0_to_1_and_the_word_a_class_number():
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    given = {"image": np.array([[[255] * 3, [0] * 3, [51] * 3]], np.uint8), "label": "seven"}
    found = load_function(f"{EXAMPLES / 'own_dataset.py'}:ink", flag="--data.preprocess")(given)
    assert found["image"].dtype == np.float32
    np.testing.assert_allclose(found["image"], [[[0], [1], [0.8]]], rtol=1e-6)
    assert found["label"] == 7


@pytest.mark.optimized
class TestFineTune:
    def test_all_but_the_head_comes_from_the_file_in_the_dtype_that_the_policy_stores(self, fine_tune):
        assert fine_tune.report.skipped == ("head/bias", "head/kernel")
        assert len(fine_tune.report) == 32
        assert {row.after for row in fine_tune.report} == {np.dtype("float32")}
        assert (fine_tune.report.overflow, fine_tune.report.flushed) == (0, 0)

    def test_it_learns_faster_than_from_scratch(self, fine_tune):
        """By 0.31, 0.43 and 0.37 with seeds 0, 1 and 2."""
        assert fine_tune.scratch["steps"] == fine_tune.tuned["steps"] == 60
        assert fine_tune.tuned["test/accuracy"] - fine_tune.scratch["test/accuracy"] > 0.2


@pytest.mark.optimized
class TestOwnModel:
    def test_it_learns_in_float16_with_its_rule(self, own_model):
        assert own_model.summary["policy"] == "params=float16,compute=float16,output=float32;type:Gate=float32"
        assert own_model.summary["skipped"] == 0
        assert own_model.summary["test/accuracy"] > 0.85


class TestAuditOfOwnModel:
    @pytest.mark.slow
    def test_without_the_rule_the_gates_gradient_adds_up_in_float16(self):
        module = example("own_model")
        _, found = module.audit({})
        assert sorted(module.suspects(found)) == [
            "blocks/0/gate: 1 reduce_sum in float16",
            "blocks/1/gate: 1 reduce_sum in float16",
        ]

    def test_with_the_rule_nothing_does_that_should_not(self):
        module = example("own_model")
        given, found = module.audit(module.RULES)
        found.assert_clean()
        assert found.narrow == ()
        assert {row.path: (str(row.param_dtype), row.rule) for row in given if "gate" in row.path} == {
            "blocks/0/gate": ("float32", "type:Gate"),
            "blocks/1/gate": ("float32", "type:Gate"),
        }
        assert {str(row.dtype) for row in found if row.kind == "low"} == {"float16"}
