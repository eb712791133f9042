"""What is advised for files that no reader knows by their names."""

import numpy as np
import pytest

from mpjax.config import Data, check, load_config
from mpjax.data.sources import is_readable, open_prepared, way_to_read
from mpjax.errors import UsageError


FUNCTION = (
    "write --data.name FILE.py:NAME with a function that reads it and returns \\(train, test\\), each a dict of arrays$"
)


def write(folder, name):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".npz"):
        np.savez(file, a=np.zeros(3))
    else:
        file.write_bytes({"npy": b"\x93NUMPY\0", "pt": b"PK\x03\x04\0\0"}.get(name.rpartition(".")[2], b"a,b\n1,2\n"))
    return file


@pytest.mark.parametrize(
    ("name", "there", "advice"),
    [
        ("dig.npz", "dig.npz", FUNCTION),
        ("dig.npy", "dig.npy", FUNCTION),
        ("dig.pt", "dig.pt", FUNCTION),
        ("dig", "dig/a.npz", FUNCTION),
        ("dig.csv", "dig.csv", "write --data.name hf:{path}$"),
        ("dig.CSV", "dig.CSV", "write --data.name hf:{path}$"),
        ("dig", "dig/a.CSV", FUNCTION),  # `datasets` finds no such file in a folder
        ("dig", "dig/a.csv", "write --data.name hf:{path}$"),
        ("dig", "dig/0/a.png", "write --data.name folder:{path}$"),
    ],
)
def test_hf_is_advised_only_for_what_it_reads(tmp_path, name, there, advice):
    write(tmp_path, there)
    path = tmp_path / name
    with pytest.raises(UsageError, match=advice.format(path=path)) as refused:
        open_prepared(Data(name=str(path)), tmp_path / "data")
    kind, _, rest = refused.value.repair.get("data.name", "").partition(":")
    assert (kind, rest) in (("", ""), ("folder", str(path))) or is_readable(path)


@pytest.mark.parametrize(
    ("content", "formats"),
    [
        (b"PAR1\0\0", "parquet"),
        (b"ARROW1\0\0", "arrow"),
        (b"a,b\n1,2\n", "csv or tsv or json or text"),
        (b"", "csv or tsv or json or text"),
    ],
)
def test_a_format_is_advised_that_the_first_bytes_allow(tmp_path, content, formats):
    (tmp_path / "a.data").write_bytes(content)
    assert (
        way_to_read(tmp_path / "a.data")
        == f"write --data.name hf:FORMAT:{tmp_path / 'a.data'} with {formats} for FORMAT"
    )


def test_a_file_of_arrays_is_a_data_set_by_its_name_alone(tmp_path):
    file = write(tmp_path, "a.npz")
    assert way_to_read(file) == f"write --data.name {file}"


@pytest.mark.parametrize(("name", "advice"), [("a.npz", "leave it out"), ("a.tsv", "write --data.name hf:.*a.tsv")])
def test_a_header_is_advised_only_for_tables(tmp_path, name, advice):
    file = write(tmp_path, name)
    with pytest.raises(UsageError, match=f"--data.header is for csv and tsv files.*{advice}$"):
        check(load_config(["--data.header", "a", "b", "--data.name", str(file)]))
