"""From the name of a data set to its examples."""

import pathlib

from mpjax.config.schema import Data
from mpjax.config.task import TaskName
from mpjax.data import synthetic
from mpjax.data.examples import Source


def open_source(config: Data, data_dir: pathlib.Path, task: TaskName = "classification") -> Source:
    """Opens the data set that `config.name` names, as the task wants it.

    Args:
      config: `name` is `digits` (written on first use), `synthetic:HxWxC:CLASSES` (generated), or a
        tensorflow-datasets set prepared below `data_dir`: `name`, `name/config`, either with `/version`.
      data_dir: folder of prepared data sets.
      task: which fields an example is to have.

    Raises:
      UsageError: there is no such set, split, image or label, or it needs TensorFlow to read; the message says what
        is there and how to prepare what is not.
    """
    if config.name.partition(":")[0] == synthetic.NAME and task == "classification":
        # Two different batches are enough to try a configuration.
        return synthetic.parse_synthetic(config.name, size=2 * config.batch_size)
    # tensorflow-datasets takes a second to import.
    from mpjax.data.prepared import open_prepared
    from mpjax.data.task import as_task

    if config.name == "digits":
        from mpjax.data.digits import prepare_digits

        prepare_digits(data_dir)
    return as_task(open_prepared(config, data_dir), task, config)
