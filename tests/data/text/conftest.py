"""Stored sets of a few rows, for what makes conversations of them."""

import dataclasses

import pytest

from mpjax.data import Other, Table, Text


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: tuple
    columns: tuple

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: self.rows[index][name] for name in self.columns}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.fixture
def table_of():
    """Makes a table of training rows and of the rows `test`, by default the first of the others."""

    def table_of(*rows, test=None):
        columns = {name: Text() if isinstance(value, str) else Other("list") for name, value in rows[0].items()}
        return Table("set", columns, lambda names: (Rows(rows, tuple(names)), Rows(test or rows[:1], tuple(names))))

    return table_of
