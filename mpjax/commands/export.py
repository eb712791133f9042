"""Exports a checkpoint: a run's folder in, a safetensors file out."""

import pathlib

from mpjax.commands.evaluate import trained_state
from mpjax.commands.task import open_task
from mpjax.config.commands import Export
from mpjax.config.folders import config_of_run
from mpjax.errors import UsageError
from mpjax.models.pretrained import PretrainedReport, export_safetensors
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


def export_run(settings: Export) -> PretrainedReport:
    """Writes a checkpoint's weights and prints what was written.

    Raises:
      UsageError: there is no run or no such checkpoint, or the model has no such layout.
    """
    folder = pathlib.Path(settings.run)
    config = config_of_run(folder, trust_code=settings.trust_code)
    if settings.ema and not config.training.ema:
        raise UsageError(f"--ema: the run in {folder} kept no moving average (training.ema is 0)")
    _, _, task = open_task(config)

    # The checkpoint's parameters
    position, state, _ = trained_state(task, folder, settings.checkpoint, Layout(make_mesh()), ema=settings.ema)

    model = task.structure.assemble(state.ema if settings.ema else state.params, state.stats)
    report = export_safetensors(model, settings.output, dtype=settings.dtype or None, layout=settings.layout)
    print(f"checkpoint {position} of {folder}: {report.totals}")
    return report
