"""A destination of metrics: a CSV file in the run's folder.

python scripts/train.py --report.writers docs/examples/parts/writer.py:csv_file
"""

import csv

from mpjax.extend import Writer


class CsvFile(Writer):
    """Writes a line for each metric."""

    def __init__(self, path):
        self.file = path.open("a", newline="")

    def write(self, step, metrics):
        """Writes the metrics of one report."""
        csv.writer(self.file).writerows((step, name, value) for name, value in metrics.items())

    def close(self):
        """Closes the file."""
        self.file.close()


def csv_file(run):
    """Opens the writer of a run."""
    return CsvFile(run.folder / "metrics.csv")
