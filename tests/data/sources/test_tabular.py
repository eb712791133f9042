"""Rows of csv, tsv and parquet files: what a cell becomes, by statistics of the training split alone."""

import dataclasses

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Encoding, open_source
from mpjax.errors import DataWarning, UsageError


HOUSES = """area,town,price
50,Bern,100
100,Chur,123457
150,Bern,300
1000,Genf,7
"""


def opened(folder, text=HOUSES, *, task="regression", name="t.csv", stored=None, **settings):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    usual = {"train_split": "train[:3]", "test_split": "train[3:]", "rows": "stored"}
    config = Data(name=f"tabular:{file}", **{**usual, **settings})
    return open_source(config, folder, task, stored)


def rows_of(split):
    return np.stack([split[index]["row"] for index in range(len(split))])


def refused(folder, text, *parts, **settings):
    with pytest.raises(UsageError) as error:
        opened(folder, text, **settings)
    for part in parts:
        assert part in str(error.value)
    return error.value.repair


@pytest.mark.filterwarnings("ignore::mpjax.errors.DataWarning")
def test_numbers_are_standardised_by_the_training_split_and_categories_are_zeros_and_ones(tmp_path):
    source = opened(tmp_path, targets=("price",))
    assert source.fields["row"].inputs == ("area", "town = Bern", "town = Chur")
    # Mean 100 and deviation sqrt(5000 / 3) are those of 50, 100 and 150; the test row has no part in them.
    expected = [[-1.2247449, 1, 0], [0, 0, 1], [1.2247449, 1, 0]]
    np.testing.assert_allclose(rows_of(source.train), expected, rtol=1e-6)
    np.testing.assert_allclose(rows_of(source.test), [[22.04541, 0, 0]], rtol=1e-6)
    assert rows_of(source.train).dtype == np.float32


def test_a_category_that_no_training_row_has_is_told(tmp_path):
    with pytest.warns(DataWarning, match="column 'town' has 'Genf' in 1 of 1 rows, which no training row has"):
        opened(tmp_path, targets=("price",))


@pytest.mark.filterwarnings("ignore::mpjax.errors.DataWarning")
def test_stored_statistics_are_used_and_survive_the_file_bit_for_bit(tmp_path):
    first = opened(tmp_path, targets=("price",))
    again = Encoding.from_json(first.encoding.to_json(), "columns.json")
    assert again == first.encoding
    other = opened(tmp_path, HOUSES.replace("50,Bern,100", "5000,Bern,1"), targets=("price",), stored=again)
    np.testing.assert_array_equal(rows_of(other.train)[1:], rows_of(first.train)[1:])
    assert other.train[0]["row"][0] == pytest.approx(4900 / np.sqrt(5000 / 3))
    assert other.fields["target"] == first.fields["target"]
    with pytest.raises(UsageError, match=r"--data.drop area: the run began with none"):
        opened(tmp_path, targets=("price",), drop=("area",), stored=again)


@pytest.mark.filterwarnings("ignore::mpjax.errors.DataWarning")
def test_a_damaged_file_of_statistics_is_named():
    with pytest.raises(UsageError, match=r"runs/a/columns.json is damaged"):
        Encoding.from_json(b'{"columns": [{"name": "x"}]}', "runs/a/columns.json")


def test_a_large_number_keeps_its_digits_beside_others(tmp_path):
    """Standardised in float32, the moments of this column would have one bit."""
    text = "time,y\n" + "".join(f"{1_700_000_000 + 7 * n},{n}\n" for n in (3, 0, 1, 2))
    times = rows_of(opened(tmp_path, text, targets=("y",), test_split="train[:3]").train)[:, 0]
    np.testing.assert_allclose(times, [1.3363062, -1.069045, -0.26726124], rtol=1e-6)


@pytest.mark.parametrize("gap", ["", "NA", "n/a", "NaN", "?", "null", "None", "unknown"])
def test_a_missing_number_is_the_mean_and_an_input_says_so(tmp_path, gap):
    text = f"x,y\n1,1\n{gap},2\n3,3\n5,4\n"
    source = opened(tmp_path, text, targets=("y",), missing=("unknown",))
    assert source.fields["row"].inputs == ("x", "x is missing")
    assert rows_of(source.train).tolist() == [[-1, 0], [0, 1], [1, 0]]
    assert "missing numbers become the mean, and an input says that they are missing: x" in source.notes


def test_a_number_that_means_a_missing_one_does_so_however_it_is_written(tmp_path):
    text = "x,y\n1,1\n-999,2\n3,3\n-999.0,4\n"
    whole = {"train_split": "train", "test_split": "train"}
    source = opened(tmp_path, text, targets=("y",), missing=("-999",), **whole)
    assert rows_of(source.train).tolist() == [[-1, 0], [0, 1], [1, 0], [0, 1]]
    refused(tmp_path, text, "target 'x' is missing in row 2", targets=("x",), missing=("-999",), **whole)


def test_no_thousands_begin_with_zero(tmp_path):
    text = "x;y\n0,125;1\n0,250;2\n1,500;3\n2,000;4\n"
    repair = refused(tmp_path, text, "column 'x' has", "'0,125' in row 1", targets=("y",), decimal=".")
    assert repair == {"data.decimal": ","}
    assert opened(tmp_path, text, targets=("y",), decimal=",").encoding.columns[0].mean == 0.625


def test_a_gap_that_training_has_not_is_told(tmp_path):
    with pytest.warns(DataWarning, match="column 'x' is missing in 1 of 1 rows, and in no training row"):
        source = opened(tmp_path, "x,y\n1,1\n2,2\n3,3\n,4\n", targets=("y",))
    assert rows_of(source.test).tolist() == [[0]]


def test_a_constant_column_and_one_that_counts_the_rows_are_left_out_and_told(tmp_path):
    rows = "".join(f"{n + 17},4.5,{n % 4},{n}\n" for n in range(12))
    text = "id,flat,x,y\n" + rows
    source = opened(tmp_path, text, targets=("y",), train_split="train", test_split="train")
    assert source.fields["row"].inputs == ("x",)
    assert "left out, since they are the same in all training rows: flat" in source.notes
    assert "left out, since they count the rows: id" in source.notes


@pytest.mark.parametrize("name", ["", "__index_level_0__"])
def test_an_index_that_pandas_wrote_is_no_input(tmp_path, name):
    text = f"{name},x,y\n17,1,1\n3,2,2\n8,4,3\n5,3,4\n"
    source = opened(tmp_path, text, targets=("y",))
    assert source.fields["row"].inputs == ("x",)
    assert any(f"left out, since it has no name, as the index that pandas writes: '{name}'" in n for n in source.notes)


def test_texts_that_are_nearly_all_different_are_an_id(tmp_path):
    text = "name,x,y\n" + "".join(f"person {n},{n % 3},{n % 5}\n" for n in range(12))
    repair = refused(
        tmp_path, text, "a text of their own in 'name'", "--data.drop name", train_split="train[:11]", targets=("y",)
    )
    assert repair == {"data.drop": ("name",)}
    chosen = opened(tmp_path, text, categories=("name",), targets=("y",), train_split="train", test_split="train")
    assert len(chosen.fields["row"].inputs) == 13


def test_numbers_that_are_categories_are_so_where_asked(tmp_path):
    text = "month,y\n10,1\n2,2\n10,3\n2,4\n"
    assert opened(tmp_path, text, targets=("y",)).fields["row"].inputs == ("month",)
    source = opened(tmp_path, text, targets=("y",), categories=("month",))
    assert source.fields["row"].inputs == ("month = 2", "month = 10")


def test_a_whole_number_is_one_category_however_it_is_written(tmp_path):
    text = "month,y\n1,1\n1.0,2\n02,3\n1e0,4\n"
    source = opened(tmp_path, text, targets=("y",), categories=("month",))
    assert source.fields["row"].inputs == ("month = 1", "month = 02")
    assert (rows_of(source.train).tolist(), rows_of(source.test).tolist()) == ([[1, 0], [1, 0], [0, 1]], [[1, 0]])


@pytest.mark.parametrize(
    ("cell", "decimal", "number"),
    [("1,234", ".", 1234), ("1,234.5", ".", 1234.5), ("1.234,5", ",", 1234.5), ("3,14", ",", 3.14), ("1e3", "", 1000)],
)
def test_signs_in_numbers_are_read_as_stated(tmp_path, cell, decimal, number):
    text = f"x;y\n{cell};1\n0;2\n0;3\n0;4\n"
    source = opened(tmp_path, text, targets=("y",), decimal=decimal)
    assert source.encoding.columns[0].mean == pytest.approx(number / 3)
    assert "t.csv: cells are separated by a semicolon" in source.notes


def test_signs_in_numbers_are_never_guessed(tmp_path):
    text = 'x,y\n"1,234",1\n"2,500",2\n"3,000",3\n"1,000",4\n'
    assert refused(tmp_path, text, "column 'x' has '1,234' in row 1", "--data.decimal .", targets=("y",)) == {}
    repair = refused(tmp_path, text.replace("1,234", "1,23"), "'1,23'", targets=("y",))
    assert repair == {"data.decimal": ","}


def test_a_column_of_numbers_with_the_other_sign_is_no_column_of_categories(tmp_path):
    text = "x;z;y\n1,5;1.5;1\n2,5;2.5;2\n3,5;1.5;3\n4,5;2.5;4\n"
    refused(tmp_path, text, "'z' has '1.5' in row 1", "as --data.decimal , says", targets=("y",), decimal=",")
    source = opened(tmp_path, text, targets=("y",), decimal=",", categories=("z",))
    assert source.fields["row"].inputs == ("x", "z = 1.5", "z = 2.5")


def test_a_word_among_numbers_is_an_error_and_not_a_category(tmp_path):
    text = "x,y\n1,1\n2,2\noops,3\n4,4\n"
    refused(tmp_path, text, "column 'x' has 2 numbers, but 'oops' in row 3", "--data.missing 'oops'", targets=("y",))
    with pytest.raises(UsageError, match=r"'oops' in row 3 of t.csv; wanted a number"):
        opened(tmp_path, text, targets=("y",), train_split="train[:2]", test_split="train[2:]")


def test_a_file_without_a_line_of_names_is_told_and_read_by_the_names_that_are_given(tmp_path):
    text = "1,4\n2,3\n3,5\n4,8\n5,9\n"
    repair = refused(tmp_path, text, "looks like an example", "--data.header column1 column2", targets=("y",))
    assert repair == {"data.header": ("column1", "column2")}
    source = opened(tmp_path, text, header=("x", "y"), targets=("y",))
    assert len(source.train) + len(source.test) == 5
    refused(tmp_path, HOUSES, "has these names already", header=("area", "town", "price"), targets=("price",))
    words = "x,c,y\nu,s,0\nv,t,1\nu,t,0\nv,s,1\n"
    other = {"header": ("c", "x", "label"), "task": "classification", "targets": ("label",)}
    assert refused(tmp_path, words, "these names already, in another order", **other) == {"data.header": ()}


def test_files_that_cannot_be_read_as_one_table_are_errors(tmp_path):
    refused(tmp_path, "a,b\n1,2\n1,2,3\n", "line 3 has 3 cells", targets=("b",))
    refused(tmp_path, "a,a\n1,2\n", "two columns are named 'a'", targets=("a",))
    refused(tmp_path, "", "is empty", targets=("a",))
    refused(tmp_path, "a,b\n", "there are no rows", targets=("b",))
    refused(tmp_path, HOUSES, "--data.targets prise", "did you mean price?", targets=("prise",))
    refused(
        tmp_path, HOUSES, "--data.drop twon: there is no such", "did you mean town?", drop=("twon",), targets=("price",)
    )
    refused(tmp_path, HOUSES, "wanted a file that ends in .csv", name="t.xlsx", targets=("price",))


def test_targets_that_are_no_numbers_are_told(tmp_path):
    refused(tmp_path, HOUSES, "--task regression", "'Bern'", "write --task classification", targets=("town",))
    gap = HOUSES.replace("Bern,100", "Bern,")
    refused(tmp_path, gap, "target 'price' is missing in row 1 of t.csv, 1 of 3 rows", targets=("price",))
    refused(tmp_path, "x,y\n1,5\n2,5\n3,5\n4,5\n", "target 'y' is 5.0 in all training rows", targets=("y",))
    with pytest.raises(
        UsageError, match=r"which column has the number to predict.*as in --data.targets price"
    ) as error:
        opened(tmp_path)
    assert error.value.repair == {"data.targets": ("price",)}


@pytest.mark.parametrize(("small", "large", "deviation"), [("1e300", "3e300", "inf"), ("1e-300", "3e-300", "0")])
def test_numbers_whose_deviation_float64_does_not_hold_are_told(tmp_path, small, large, deviation):
    text = f"x,y\n{small},1\n{large},2\n{small},3\n{large},4\n"
    told = f"from {float(small):g} to {float(large):g}"
    refused(tmp_path, text, "column 'x': its numbers, " + told, f"a deviation of {deviation} in", targets=("y",))
    refused(tmp_path, text, "target 'x': its numbers, " + told, f"a deviation of {deviation} in", targets=("x",))


def test_a_target_has_float32_and_comes_back_with_its_digits(tmp_path):
    source = opened(tmp_path, HOUSES, targets=("price", "area"), test_split="train[:1]")
    target = source.fields["target"]
    batch = np.stack([source.train[n]["target"] for n in range(3)])
    assert batch.dtype == np.float32
    assert target.in_units(batch).tolist() == [[100, 50], [123457, 100], [300, 150]]


def test_classes_are_those_of_the_training_split(tmp_path):
    text = "x,kind\n1,2.0\n2,10\n3,2\n4,10.0\n"
    source = opened(tmp_path, text, task="classification", targets=("kind",))
    assert (source.fields["label"].num_classes, source.fields["label"].names) == (2, ("2", "10"))
    assert [source.train[n]["label"] for n in range(3)] == [0, 1, 0]
    assert source.test[0]["label"] == 1
    unseen = text.replace("10.0", "11")
    refused(
        tmp_path,
        unseen,
        "label 'kind' is '11' in row 4",
        "no training row has",
        task="classification",
        targets=("kind",),
    )
    floats = text.replace("2.0", "2.5")
    repair = refused(tmp_path, floats, "is 2.5 in row 1", "--task regression", task="classification", targets=("kind",))
    assert repair == {"task": "regression"}


def test_a_word_for_a_missing_number_is_no_class_beside_numbers(tmp_path):
    text = "x,kind\n1,0\n2,1\n3,NA\n4,0\n"
    says = "label 'kind' is 'NA' in row 3 of t.csv, and a number in others", "in 1 of 3 rows"
    refused(tmp_path, text, *says, task="classification", targets=("kind",))
    regions = text.replace(",0", ",EU").replace(",1", ",SA")
    source = opened(tmp_path, regions, task="classification", targets=("kind",))
    assert source.fields["label"].names == ("EU", "NA", "SA")


def test_a_word_that_the_user_calls_missing_is_no_class(tmp_path):
    text = "x,kind\n1,a\n2,b\n3,Unknown\n4,a\n"
    says = "label 'kind' is 'Unknown' in row 3 of t.csv, which --data.missing says is a missing one", "in 1 of 3 rows"
    refused(tmp_path, text, *says, task="classification", targets=("kind",), missing=("unknown",))


def test_several_labels_are_zeros_and_ones(tmp_path):
    text = "x,a,b\n1,0,True\n2,1,False\n3,1,true\n4,0,1\n"
    source = opened(tmp_path, text, task="multilabel", targets=("a", "b"))
    assert [source.train[n]["labels"].tolist() for n in range(3)] == [[0, 1], [1, 0], [1, 1]]
    bad = text.replace("2,1,", "2,2,")
    refused(tmp_path, bad, "label 'a' is '2' in row 2", "wanted 0 or 1", task="multilabel", targets=("a", "b"))


def test_a_part_of_a_file_is_random_and_the_same_every_time(tmp_path):
    text = "x,y\n" + "".join(f"{n % 7},{n}\n" for n in range(20))
    source = opened(tmp_path, text, targets=("y",), rows="shuffled", train_split="train[:15]", test_split="train[15:]")
    held = source.fields["target"].in_units(np.stack([source.test[n]["target"] for n in range(5)]))[:, 0]
    assert held.tolist() == [7, 19, 0, 9, 3]


def test_parquet_has_the_rows_of_the_same_csv(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs pip install 'mpjax[hf]'")
    from pyarrow import parquet

    table = pa.table({"x": [1, None, 3, 5], "kind": ["a", "b", None, "a"], "y": [1.5, 2.5, 3.5, 4.5]})
    parquet.write_table(table, tmp_path / "t.parquet")
    config = Data(name=f"tabular:{tmp_path / 't.parquet'}", targets=("y",), train_split="train", test_split="train")
    stored = open_source(config, tmp_path, "regression")
    written = opened(
        tmp_path,
        "x,kind,y\n1,a,1.5\n,b,2.5\n3,,3.5\n5,a,4.5\n",
        targets=("y",),
        train_split="train",
        test_split="train",
    )
    assert stored.fields == written.fields
    np.testing.assert_array_equal(rows_of(stored.train), rows_of(written.train))


def test_parquet_keeps_integers_apart_that_are_one_number_in_float64(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs pip install 'mpjax[hf]'")
    from pyarrow import parquet

    large = 2**53
    table = pa.table({"x": [1, 2, 3, 4], "id": [large + 1, large, large, large + 1]})
    parquet.write_table(table, tmp_path / "t.parquet")
    config = Data(name=f"tabular:{tmp_path / 't.parquet'}", train_split="train", test_split="train")
    source = open_source(dataclasses.replace(config, targets=("id",)), tmp_path)
    assert source.fields["label"].names == ("9007199254740992", "9007199254740993")
    assert [source.train[n]["label"] for n in range(4)] == [1, 0, 0, 1]
    inputs = dataclasses.replace(config, targets=("x",), categories=("id",))
    assert rows_of(open_source(inputs, tmp_path, "regression").train).tolist() == [[0, 1], [1, 0], [1, 0], [0, 1]]


def test_parquet_columns_of_one_name_are_an_error(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs pip install 'mpjax[hf]'")
    from pyarrow import parquet

    columns = [pa.array([1, 2]), pa.array([5, 6]), pa.array([0, 1])]
    parquet.write_table(pa.table(columns, names=["x", "x", "y"]), tmp_path / "t.parquet")
    config = Data(name=f"tabular:{tmp_path / 't.parquet'}", targets=("y",), train_split="train", test_split="train")
    with pytest.raises(UsageError, match="two columns are named 'x'"):
        open_source(config, tmp_path, "regression")


def test_a_folder_has_a_file_for_each_split(tmp_path):
    (tmp_path / "train.csv").write_text("x,y\n1,1\n3,2\n")
    (tmp_path / "test.csv").write_text("y,x\n9,2\n")
    source = open_source(Data(name=f"tabular:{tmp_path}", targets=("y",)), tmp_path, "regression")
    assert rows_of(source.train).tolist() == [[-1], [1]]
    assert rows_of(source.test).tolist() == [[0]]
    (tmp_path / "test.csv").write_text("x\n2\n")
    with pytest.raises(UsageError, match=r"only one of them has y.*are for predict.py"):
        open_source(Data(name=f"tabular:{tmp_path}", targets=("y",)), tmp_path, "regression")


def test_a_csv_file_without_a_word_before_it_is_told_what_to_write(tmp_path):
    (tmp_path / "wine.csv").write_text(HOUSES)
    with pytest.raises(UsageError, match=r"there is a file .*wine.csv; write --data.name tabular:") as error:
        open_source(Data(name=str(tmp_path / "wine.csv")), tmp_path)
    assert error.value.repair == {"data.name": f"tabular:{tmp_path / 'wine.csv'}"}
