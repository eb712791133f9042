import json
import pathlib
import subprocess
import sys

import pytest

from mpjax.data.sources import load_splits
from mpjax.errors import DataWarning, UsageError


datasets = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")

pytestmark = pytest.mark.extra

ROWS = [{"text": "a", "label": 0}, {"text": "b", "label": 1}, {"text": "c", "label": 0}]


def write(path, kind):
    data = datasets.Dataset.from_list(ROWS)
    if kind == "csv":
        path.write_text("text,label\na,0\nb,1\nc,0\n")
    elif kind == "tsv":
        path.write_text("text\tlabel\na\t0\nb\t1\nc\t0\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "parquet":
        data.to_parquet(path)


def test_texts_that_are_numbers_stay_as_written_in_a_long_file(tmp_path):
    """pandas infers the types of each 10,000 lines for themselves."""
    words = ["text,label"] + ["a,0"] * 10_000
    (tmp_path / "long.csv").write_text("\n".join([*words, "007,1", "1.10,1"]))
    assert load_splits(str(tmp_path / "long.csv"))["train"][10_000:] == {"text": ["007", "1.10"], "label": [1, 1]}


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet", "CSV", "TSV"])
def test_one_file_is_one_split(tmp_path, kind):
    write(tmp_path / f"all.{kind}", kind.lower())
    splits = load_splits(str(tmp_path / f"all.{kind}"))
    assert list(splits) == ["train"]
    assert splits["train"].to_list() == ROWS


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_files_of_a_folder_are_splits(tmp_path, kind):
    write(tmp_path / f"train.{kind}", kind)
    write(tmp_path / f"test.{kind}", kind)
    assert {name: len(split) for name, split in load_splits(str(tmp_path)).items()} == {"train": 3, "test": 3}


@pytest.mark.parametrize("where", ["all.csv", "csv:all.data", "folder"])
def test_csv_texts_are_what_they_say_and_numbers_keep_their_gaps(tmp_path, where, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("all.csv", "all.data", "folder/train.csv"):
        (tmp_path / name).write_text('text,score,label\na,1.5,0\n,,1\n"",2,0\nNone,NA,1\n')
    data = load_splits(where)["train"]
    assert data["text"][:] == ["a", "", "", "None"]
    assert data["score"][:] == [1.5, None, 2.0, None]
    assert data["label"][:] == [0, 1, 0, 1]


def test_a_format_may_be_named(tmp_path):
    write(tmp_path / "all.data", "csv")
    assert load_splits(f"csv:{tmp_path / 'all.data'}")["train"].to_list() == ROWS
    with pytest.raises(
        UsageError, match=r".data is not a known format; wanted one of .csv, .*; or write --data.name hf:FORMAT:"
    ):
        load_splits(str(tmp_path / "all.data"))


def test_saved_to_disk_with_splits_and_without(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, dev=data).save_to_disk(tmp_path / "both")
    data.save_to_disk(tmp_path / "one")
    assert list(load_splits(str(tmp_path / "both"))) == ["train", "dev"]
    assert load_splits(str(tmp_path / "one"))["train"].to_list() == ROWS
    (file,) = (tmp_path / "one").glob("*.arrow")
    assert load_splits(str(file))["train"].to_list() == ROWS


def test_nothing_is_printed(tmp_path, capfd):
    write(tmp_path / "all.csv", "csv")
    load_splits(str(tmp_path / "all.csv"))
    assert capfd.readouterr() == ("", "")
    assert not datasets.utils.are_progress_bars_disabled()


@pytest.mark.parametrize("where", ["/no/such.csv", "csv:/no/such", "./no", "such.parquet"])
def test_nothing_there(where):
    with pytest.raises(UsageError, match=f"data set 'hf:{where}': nothing at .*; wanted a file or folder"):
        load_splits(where)


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(UsageError, match="data set 'hf:.*x.parquet': "):
        load_splits(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("name", "arguments"), [("owner/set", '"owner/set"'), ("owner/set/part", '"owner/set", "part"'), ("set", '"set"')]
)
def test_no_network(name, arguments, monkeypatch):
    def load_dataset(*_):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UsageError) as raised:
        load_splits(name)
    assert f"data set 'hf:{name}': Couldn't reach it; there is no file or folder of that name" in str(raised.value)
    assert f'datasets.load_dataset({arguments}).save_to_disk("DIR")\'' in str(raised.value)


def test_names_and_configurations(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or datasets.DatasetDict())
    for name in ("set", "owner/set", "owner/set/part"):
        load_splits(name)
    assert asked == [("set",), ("owner/set",), ("owner/set", "part")]


def test_old_names_have_no_owner(monkeypatch):
    def load_dataset(name, config=None):
        if name != "glue":
            raise datasets.exceptions.DatasetNotFoundError(f"'{name}' doesn't exist on the Hub")
        return datasets.DatasetDict({config: datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_splits("glue/sst2")) == ["sst2"]
    with pytest.raises(UsageError, match=r"data set 'hf:gluu/sst2': 'gluu' doesn't exist.*hf:OWNER/NAME/CONFIG"):
        load_splits("gluu/sst2")


def test_without_the_package():
    code = "import sys; sys.modules['datasets'] = None\nfrom mpjax.data.open import open_source\n"
    code += "from mpjax.config import Config\nimport dataclasses\n"
    code += "try: open_source(dataclasses.replace(Config().data, name='hf:x'), None)\n"
    code += "except ValueError as error: print(error)"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "data set 'hf:x' needs the package datasets" in printed
    assert "write: pip install 'mpjax[hf]'" in printed


@pytest.mark.parametrize("name", ["all.tsv", "all.csv", "tsv:all.txt", "folder"])
def test_columns_without_names_get_those_of_the_header(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    lines = [("neg", "NA"), ("pos", "b"), ("neg", "c")]
    separator = "," if name.endswith("csv") else "\t"
    pathlib.Path("folder").mkdir()
    file = {"tsv:all.txt": "all.txt", "folder": "folder/train.tsv"}.get(name, name)
    pathlib.Path(file).write_text("".join(f"{label}{separator}{text}\n" for label, text in lines))
    split = load_splits(name, ("label", "text"))["train"]
    assert split.column_names == ["label", "text"]
    assert [(row["label"], row["text"]) for row in split] == lines


def test_a_missing_number_of_a_file_without_names_stays_missing(tmp_path):
    (tmp_path / "all.csv").write_text("1,NA\n,b\n0,c\n")
    assert load_splits(str(tmp_path / "all.csv"), ("label", "text"))["train"].to_list() == [
        {"label": 1.0, "text": "NA"},
        {"label": None, "text": "b"},
        {"label": 0.0, "text": "c"},
    ]


@pytest.mark.parametrize("name", ["all.json", "owner/name", "json:all.csv", "photos"])
def test_a_header_is_for_tables(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("photos").mkdir()
    pathlib.Path("all.json").write_text(json.dumps(ROWS))
    pathlib.Path("all.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=f"label text is for csv and tsv files, which 'hf:{name}' is not"):
        load_splits(name, ("label", "text"))


@pytest.mark.parametrize("quotes", [1, 2])
def test_quotes_of_a_tsv_join_no_lines(tmp_path, quotes):
    texts = ['"dull', "fine", '"weak' if quotes == 2 else "weak", "good"]
    (tmp_path / "all.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{at}\n" for at, text in enumerate(texts)))
    with pytest.warns(DataWarning, match="quotes of the tsv file are read as characters"):
        split = load_splits(str(tmp_path / "all.tsv"))["train"]
    assert split["text"][:] == texts


def test_pairs_of_quotes_in_a_tsv_are_quotes(tmp_path):
    (tmp_path / "all.tsv").write_text('text\tlabel\n"a\tb"\t1\n"c\nd"\t0\n')
    assert load_splits(str(tmp_path / "all.tsv"))["train"]["text"][:] == ["a\tb", "c\nd"]
