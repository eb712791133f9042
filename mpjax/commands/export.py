"""Exports a checkpoint: a run's folder in, a safetensors file out."""

import pathlib

from mpjax import data
from mpjax.commands.evaluate import trained_state
from mpjax.commands.parts import make_task, set_up_jax
from mpjax.config.commands import Export
from mpjax.config.folders import config_of_run, data_folder
from mpjax.errors import UsageError
from mpjax.models.pretrained import PretrainedReport, export_safetensors
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh
from mpjax.training.precision_plan import plan_precision


def export_run(settings: Export) -> PretrainedReport:
    """Writes a checkpoint's weights and prints what was written.

    Raises:
      UsageError: there is no run or no such checkpoint, or the model has no such layout.
    """
    folder = pathlib.Path(settings.run)
    config = config_of_run(folder, trust_code=settings.trust_code)
    if settings.ema and not config.training.ema:
        raise UsageError(f"--ema: the run in {folder} kept no moving average (training.ema is 0)")
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)

    # The model: its shapes follow from the data set's
    source = data.open_source(config.data, data_folder(config), config.task)
    task = make_task(config, plan, data.batch_fields(source, config.data))

    # The checkpoint's parameters
    position, state, _ = trained_state(task, folder, settings.checkpoint, Layout(make_mesh()), ema=settings.ema)

    model = task.structure.assemble(state.ema if settings.ema else state.params, state.stats)
    report = export_safetensors(model, settings.output, dtype=settings.dtype or None, layout=settings.layout)
    print(f"checkpoint {position} of {folder}: {report.totals}")
    return report
