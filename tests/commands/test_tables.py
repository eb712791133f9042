"""Runs on tables, and on numbers beside images and texts: every command reads them by the statistics of the run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.commands import evaluate_run, export_run, predict_run, run
from mpjax.config import Evaluation, Export, Prediction, load_config
from mpjax.errors import DataWarning, UsageError


ROWS = [(n * 7 % 30, "abc"[n % 3], 123_400 + 10 * (n * 7 % 30) + 5 * (n % 3)) for n in range(60)]
FLAGS = (
    "--model.name mlp --model.width 8 --optimizer.name adamw --optimizer.learning_rate 0.01 --optimizer.warmup 2 "
    "--data.batch_size 16 --data.eval_batch_size 8 --report.no_plot --report.no_tensorboard"
)


def table(file, rows=ROWS):
    file.write_text("size,town,price\n" + "".join(f"{size},{town},{price}\n" for size, town, price in rows))
    return file


def trained(folder, flags, file):
    splits = f"--data.name tabular:{file} --data.train_split train[:50] --data.test_split train[50:]"
    run(load_config(f"--output_dir {folder} {splits} {FLAGS} {flags}".split()))
    return folder


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """The folder of a regression in float16, and its file."""
    place = tmp_path_factory.mktemp("houses")
    file = table(place / "houses.csv")
    return trained(place / "run", "--task regression --data.targets price --steps 40 --training.loss huber", file), file


def lines_of(capsys, **settings):
    predict_run(Prediction(**settings))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_regression_learns_and_its_predictions_have_the_metrics_of_its_evaluation(houses, capsys):
    folder, _ = houses
    metrics = evaluate_run(Evaluation(run=str(folder)))
    capsys.readouterr()
    lines = lines_of(capsys, run=str(folder), split="train[50:]")
    # The rows of the random part are those of the file.
    assert all(line["target"]["price"] == ROWS[int(line["input"][11:-1])][2] for line in lines)
    assert {line["input"][:11] for line in lines} == {"houses.csv["}
    errors = np.array([line["prediction"]["price"] - line["target"]["price"] for line in lines])
    assert {line["target"]["price"] for line in lines} <= {float(price) for _, _, price in ROWS}
    assert metrics["test/rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-3)
    assert metrics["test/mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-3)
    assert metrics["test/rmse"] < 60  # the deviation of the prices is 87


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "O1"])
def test_no_policy_rounds_a_prediction_to_half_precision(houses, policy, capsys):
    folder, _ = houses
    stored = json.loads((folder / "columns.json").read_text())
    lines = lines_of(capsys, run=str(folder), split="train[50:]", policy=policy)
    numbers = np.array([line["prediction"]["price"] for line in lines])
    standardised = (numbers - stored["mean"][0]) / stored["std"][0]
    half = np.asarray(standardised).astype(jnp.bfloat16 if "bfloat" in policy else np.float16).astype(np.float64)
    # A number that was rounded is in float16 to 1e-6 of itself: only these do the digits of a line leave.
    assert np.mean(np.abs(standardised - half) > 1e-5 * np.abs(standardised)) > 0.5


def test_an_empty_row_between_others_keeps_its_place(houses, tmp_path, capsys):
    folder, _ = houses
    (tmp_path / "new.csv").write_text("town,size\nb,7\n,\nc,14\n,\n,\n")
    size, town = "column 'size' is missing in 1 of 3 rows", "column 'town' has '' in 1 of 3 rows"
    with pytest.warns(DataWarning, match=size), pytest.warns(DataWarning, match=town):
        lines = lines_of(capsys, inputs=(str(tmp_path / "new.csv"),), run=str(folder))
    assert [line["input"].removeprefix(str(tmp_path)) for line in lines] == [f"/new.csv[{n}]" for n in range(3)]


def test_a_run_without_a_line_of_names_predicts_files_with_and_without_one(tmp_path, capsys):
    plain = tmp_path / "plain.csv"
    plain.write_text("".join(f"{size},{town},{price}\n" for size, town, price in ROWS))
    flags = "--task regression --data.targets price --data.header size town price --steps 2"
    folder = str(trained(tmp_path / "run", flags, plain))
    capsys.readouterr()
    named = tmp_path / "named.csv"
    named.write_text("town,note,size\nb,x,7\nc,y,14\n")
    new, known = (lines_of(capsys, inputs=(str(file),), run=folder) for file in (named, plain))
    assert [line["prediction"] for line in new] == [line["prediction"] for line in known[1:3]]
    named.write_text("town,size,price\n")
    with pytest.raises(UsageError, match="there are no rows"):
        lines_of(capsys, inputs=(str(named),), run=folder)
    named.write_text("7,b\n14,c\n")
    with pytest.raises(UsageError, match="the first line is 7,b; wanted one that names the columns size, town, or an"):
        lines_of(capsys, inputs=(str(named),), run=folder)


def test_rows_of_a_file_without_prices_are_predicted_as_those_of_the_split(houses, tmp_path, capsys):
    folder, _ = houses
    (tmp_path / "new.tsv").write_text("town\tnote\tsize\nb\tx\t7\nc\ty\t14\n")
    new = lines_of(capsys, inputs=(str(tmp_path / "new.tsv"),), run=str(folder))
    known = {
        (s, t): line for (s, t, _), line in zip(ROWS, lines_of(capsys, run=str(folder), split="train"), strict=True)
    }
    assert [line["prediction"] for line in new] == [known[7, "b"]["prediction"], known[14, "c"]["prediction"]]
    assert new[1]["input"] == f"{tmp_path / 'new.tsv'}[1]"


def test_an_input_that_lacks_a_column_or_has_a_word_for_a_number_is_told(houses, tmp_path, capsys):
    folder, _ = houses
    file = tmp_path / "new.csv"
    file.write_text("town\nb\n")
    with pytest.raises(UsageError, match="there is no column 'size', which the model takes"):
        predict_run(Prediction(inputs=(str(file),), run=str(folder)))
    file.write_text("town,size\nb,seven\nc,14\n")
    with pytest.raises(UsageError, match=r"column 'size' has 'seven' in row 1 of new.csv; the run reads .* sign '\.'"):
        predict_run(Prediction(inputs=(str(file),), run=str(folder)))
    lines = lines_of(capsys, inputs=(str(file),), run=str(folder), skip_bad=True)
    assert [line["input"] for line in lines] == [f"{file}[1]"]


def test_other_training_rows_do_not_change_what_a_trained_model_is_given(houses, capsys):
    folder, file = houses
    before = lines_of(capsys, run=str(folder), split="train[50:]")
    text = file.read_text()
    try:
        tested = {line["target"]["price"] for line in before}
        size, town, price = next(row for row in ROWS if row[2] not in tested)
        file.write_text(text.replace(f"{size},{town},{price}", f"900,{town},999999"))
        assert lines_of(capsys, run=str(folder), split="train[50:]") == before
    finally:
        file.write_text(text)


def test_a_run_without_its_statistics_is_an_error(houses):
    folder, _ = houses
    stored = (folder / "columns.json").read_bytes()
    (folder / "columns.json").unlink()
    try:
        for command in (
            lambda: evaluate_run(Evaluation(run=str(folder))),
            lambda: run(load_config(f"--resume --output_dir {folder}".split())),
        ):
            with pytest.raises(UsageError, match=r"columns.json is missing, which has the statistics"):
                command()
    finally:
        (folder / "columns.json").write_bytes(stored)


def test_statistics_that_were_edited_after_training_are_an_error(houses):
    folder, _ = houses
    stored = (folder / "columns.json").read_bytes()
    edited = json.loads(stored)
    edited["mean"][0] += 1.0
    (folder / "columns.json").write_text(json.dumps(edited))
    try:
        for command in (
            lambda: evaluate_run(Evaluation(run=str(folder))),
            lambda: export_run(Export(run=str(folder), output=str(folder / "x.safetensors"))),
            lambda: run(load_config(f"--resume --output_dir {folder} --steps 99".split())),
        ):
            with pytest.raises(UsageError, match=r"columns.json has changed since the checkpoint was saved"):
                command()
    finally:
        (folder / "columns.json").write_bytes(stored)


def test_a_resumed_run_keeps_its_statistics(tmp_path):
    file = table(tmp_path / "t.csv")
    folder = trained(tmp_path / "run", "--task regression --data.targets price --steps 4", file)
    stored = (folder / "columns.json").read_bytes()
    table(file, [(900, "a", 999_999), *ROWS[1:]])
    resume = f"--resume --output_dir {folder} --steps 8"
    with pytest.raises(UsageError, match="the data is not that of checkpoint 4"):
        run(load_config(resume.split()))
    with pytest.raises(UsageError, match="--data.drop town: the run began with none"):
        run(load_config(f"{resume} --other_data --data.drop town".split()))
    run(load_config(f"{resume} --other_data".split()))
    assert (folder / "columns.json").read_bytes() == stored


def test_rows_are_classified_and_labelled(tmp_path, capsys):
    file = table(tmp_path / "t.csv")
    classes = trained(tmp_path / "classes", "--data.targets town --steps 4 --data.drop price", file)
    capsys.readouterr()
    lines = lines_of(capsys, run=str(classes), split="train[:2]")
    assert set(lines[0]) == {"input", "class", "probability", "top", "label"}
    assert {line["label"] for line in lines} <= {"a", "b", "c"}
    file = tmp_path / "labels.csv"
    file.write_text("x,big,odd\n" + "".join(f"{n},{int(n > 30)},{n % 2}\n" for n in (n * 7 % 60 for n in range(60))))
    labels = trained(tmp_path / "labels", "--task multilabel --data.targets big odd --steps 4", file)
    capsys.readouterr()
    (line, *_) = lines_of(capsys, run=str(labels), split="train[:2]")
    assert set(line) == {"input", "prediction", "probabilities", "labels"}
    assert list(line["probabilities"]) == ["big", "odd"]


IMAGES = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 1), np.uint8)


def with_brightness():
    values = IMAGES.mean(axis=(1, 2, 3)) * 1000
    split = {"image": IMAGES, "light": values, "both": np.stack([values, -values], 1)}
    return split, {name: column[:10] for name, column in split.items()}


@pytest.mark.parametrize(
    ("policy", "targets"),
    [
        *(("mixed_float16", "light"), ("O1", "both")),
        pytest.param("float32", "both", marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", "light", marks=pytest.mark.slow),
        pytest.param("float16", "light", marks=pytest.mark.slow),
    ],
)
def test_numbers_beside_images_are_learned_under_every_policy(tmp_path, policy, targets):
    flags = f"--task regression --precision.policy {policy} --data.targets {targets} --steps 3 {FLAGS}"
    summary = run(load_config(f"--output_dir {tmp_path / 'run'} {flags}".split()), source=with_brightness)
    stored = json.loads((tmp_path / "run" / "columns.json").read_text())
    assert stored["targets"] == {"light": ["light"], "both": ["both[0]", "both[1]"]}[targets]
    brightness = IMAGES.mean(axis=(1, 2, 3)) * 1000
    assert stored["mean"][0] == pytest.approx(brightness.mean(), rel=1e-12)
    # An untrained model's error is of the size of the deviation, in the units of the data.
    assert 0.2 < summary["test/rmse"] / brightness.std() < 3
    assert summary["skipped"] == 0


REVIEWS = """
import numpy as np

def reviews():
    words = np.random.default_rng(0).integers(0, 5, (80, 3))
    names = np.array(["bad", "dull", "fine", "good", "superb"])
    rows = {
        "text": [" ".join(row) for row in names[words]],
        "score": 100.0 + words.sum(1),
        "poor": (words.sum(1) < 5).astype(int),
        "rich": (words.sum(1) > 5).astype(int),
    }
    return rows, {name: values[:16] for name, values in rows.items()}
"""


@pytest.fixture
def run_on_reviews(tmp_path):
    """Trains a small BERT on 80 texts of three words, and returns the folder of its run."""
    (tmp_path / "sets.py").write_text(REVIEWS)
    data = f"--data.name {tmp_path / 'sets.py'}:reviews --data.length 8 --data.tokenizer words --data.batch_size 16"
    model = "--model.name bert --model.width 32 --model.heads 2 --model.depth 1 --optimizer.name adamw"
    rest = "--optimizer.learning_rate 0.003 --optimizer.warmup 2 --report.no_plot --report.no_tensorboard --steps 160"

    def train(flags):
        run(load_config(f"--output_dir {tmp_path / 'run'} {data} {model} {rest} {flags}".split()))
        return str(tmp_path / "run")

    return train


@pytest.mark.slow
def test_numbers_are_learnt_from_texts(run_on_reviews, tmp_path, capsys):
    folder = run_on_reviews("--task regression --data.targets score")
    metrics = evaluate_run(Evaluation(run=folder, trust_code=True))
    capsys.readouterr()
    lines = lines_of(capsys, run=folder, split="test", trust_code=True)
    errors = np.array([line["prediction"]["score"] - line["target"]["score"] for line in lines])
    assert metrics["test/rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-3)
    assert metrics["test/rmse"] < 1  # the deviation of the scores is 2.4
    (tmp_path / "new.txt").write_text("bad bad bad\nsuperb superb superb\n")
    new = lines_of(capsys, run=folder, inputs=[f"{tmp_path}/new.txt"], trust_code=True)
    assert [line["prediction"]["score"] for line in new] == pytest.approx([100, 112], abs=3)
    export_run(Export(run=folder, what="program", output=str(tmp_path / "program"), trust_code=True))
    assert "tokens int32[B, 8], length int32[B] to numbers (score) float32[B, 1]" in capsys.readouterr().out


@pytest.mark.slow
def test_labels_are_learnt_from_texts(run_on_reviews):
    folder = run_on_reviews("--task multilabel --data.targets poor rich")
    assert evaluate_run(Evaluation(run=folder, trust_code=True))["test/macro_f1"] > 0.9
