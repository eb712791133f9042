"""Exports a checkpoint: a run's folder in, a file of weights or of a program out."""

import pathlib

from mpjax.commands.evaluate import trained_state
from mpjax.commands.task import open_task
from mpjax.config.commands import Export, check_export
from mpjax.config.folders import config_of_run, with_policy
from mpjax.errors import UsageError, printable
from mpjax.models.pretrained import PretrainedReport, export_safetensors
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


def export_run(settings: Export) -> PretrainedReport | None:
    """Writes a checkpoint's weights, or a program with them, and prints what was written.

    Returns:
      The report of the weights; None for a program.

    Raises:
      UsageError: there is no run or no such checkpoint, or the model has no such layout or cannot be a program.
    """
    check_export(settings)
    folder = pathlib.Path(settings.run)
    config = config_of_run(folder, trust_code=settings.trust_code)
    if settings.ema and not config.training.ema:
        raise UsageError(f"--ema: the run in {folder} kept no moving average (training.ema is 0)")
    if settings.policy:
        config = with_policy(config, settings.policy)
    plan, source, task = open_task(config)

    # The checkpoint's parameters
    position, state, _ = trained_state(task, folder, settings.checkpoint, Layout(make_mesh()), ema=settings.ema)

    if settings.what == "program":
        from mpjax.commands.export_program import write_program  # late: it imports JAX's exporter

        params = state.ema if settings.ema else state.params
        said = write_program(settings, config, plan, source, task, params, state.stats)
        print(printable(f"checkpoint {position} of {folder}: {said}"))
        return None

    model = task.structure.assemble(state.ema if settings.ema else state.params, state.stats)
    report = export_safetensors(model, settings.output, dtype=settings.dtype or None, layout=settings.layout)
    print(printable(f"checkpoint {position} of {folder}: {report.totals}"))
    return report
