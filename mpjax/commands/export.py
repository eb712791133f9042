"""Exports a checkpoint of a run to a file of weights or of a program."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import export

from mpjax.commands.build import stored_encoding
from mpjax.commands.evaluate import described_source, trained_state
from mpjax.commands.learner import open_task
from mpjax.config.commands import Export
from mpjax.config.folders import config_of_run, data_of_run, with_policy
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
from mpjax.config.tasks import COMPARED, NEXT_TOKEN, inputs_of
from mpjax.data.example_reader import batch_fields, reader
from mpjax.data.examples import Source
from mpjax.data.fields import Fields
from mpjax.data.read import SplitOfOne
from mpjax.errors import UsageError, first_line, printable
from mpjax.files import write_atomically
from mpjax.models.folder_kinds import kind_of
from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.files import find_folder
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.training.eval_step import in_evaluation
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.predict_step import logits_for
from mpjax.training.setup import Task
from mpjax.training.state import Arrays


def export_run(settings: Export) -> PretrainedReport | None:
    """Writes a checkpoint's weights, its adapters, or a program, to `settings.output`, and prints what was written.

    Weights are one safetensors file. For the layout "huggingface" of a `hf:` model, they are a folder, unless the
    output ends in .safetensors. Adapters are a folder.

    Returns:
      The report on the weights that were written; None for adapters and programs.

    Raises:
      UsageError: the settings are invalid, there is no such run, checkpoint or moving average, or the model does not
        support the layout or the export.
    """
    settings.check()
    folder = pathlib.Path(settings.run)
    config = config_of_run(folder, trust_code=settings.trust_code)
    if settings.ema and not config.training.ema:
        raise UsageError(f"--ema: the run in {folder} kept no moving average (training.ema is 0)")
    if settings.policy:
        config = with_policy(config, settings.policy)
    # A program is compared with the model on test examples; weights need no data.
    described = described_source(config, folder, settings.checkpoint) if settings.what != "program" else None
    with data_of_run(folder):
        plan, source, task = open_task(config, stored_encoding(config, folder), described)

    position, state, _ = trained_state(
        task, config, source, folder, settings.checkpoint, Layout(make_mesh()), ema=settings.ema
    )

    params = state.averaged if settings.ema else state.params
    if settings.what == "program":
        description = write_program(settings, config, plan, source, task, params, state.stats)
        print(printable(f"checkpoint {position} of {folder}: {description}"))
        return None

    model: Any = task.structure.assemble(params, state.stats)
    if settings.what == "adapter":
        print(printable(f"checkpoint {position} of {folder}: {write_adapter(settings, config, model)}"))
        return None

    if config.training.lora:
        from mpjax.models.lora import merge_lora

        merge_lora(model, dtype=settings.dtype or None)
    dtype, origin = settings.dtype or None, config.model.folder
    if origin and settings.layout == "huggingface" and not settings.output.endswith(".safetensors"):
        report = _export_folder(model, settings.output, source=origin, fields=source.fields, dtype=dtype)
        if config.task == "regression":
            target: Any = source.fields["target"]
            print(printable(f"outputs are standardised: times {[*target.std]}, plus {[*target.mean]}, for the numbers"))
        for line in _told_of_copies(origin, batch_fields(source, config.data)):
            print(printable(line))
    else:
        report = export_safetensors(model, settings.output, dtype=dtype, layout=settings.layout)
    print(printable(f"checkpoint {position} of {folder}: {report.totals}"))
    return report


def _told_of_copies(origin: str, fields: Fields) -> list[str]:
    """Says what copied files of a folder say of images that is not so in the run."""
    image: Any = fields.get("image")
    if image is None:
        return []
    from mpjax.models.vision.images import told_of_size  # local, because most runs are of no folder

    return told_of_size(find_folder(origin), image.shape)


def _export_folder(model: Any, output: str, *, source: str, fields: Fields, dtype: Any) -> PretrainedReport:
    """Writes a folder that transformers loads, of a model that was built from such a folder, `source`.

    `fields` are those of the data, which have the names of classes.
    """
    predicted = next((name for name in ("label", "labels", "target") if name in fields), None)
    predicts: Any = fields[predicted] if predicted else None
    classes = getattr(predicts, "columns" if predicted == "target" else "names", ())
    match kind_of(find_folder(source)):  # each case imports the files of its own networks
        case "encoder":
            from mpjax.models.encoder.folder import export_encoder

            problem = _PROBLEMS.get(str(predicted))
            return export_encoder(model, output, source=source, classes=classes, problem=problem, dtype=dtype)
        case "whisper":
            from mpjax.models.whisper.folder import export_whisper

            return export_whisper(model, output, source=source, classes=classes, dtype=dtype)
        case "vision" if "tokens" in fields:
            from mpjax.models.image_text.folder import export_image_text

            return export_image_text(model, output, source=source, dtype=dtype)
        case "vision":
            from mpjax.models.vision.folder import export_vision

            problem = _PROBLEMS.get(str(predicted))
            return export_vision(model, output, source=source, classes=classes, problem=problem, dtype=dtype)
        case "t5":
            from mpjax.models.t5.folder import export_t5

            return export_t5(model, output, source=source, dtype=dtype)
        case "mamba2":
            from mpjax.models.mamba2.folder import export_mamba2

            return export_mamba2(model, output, source=source, dtype=dtype)
        case "decoder":
            from mpjax.models.decoder.folder import export_decoder

            return export_decoder(model, output, source=source, dtype=dtype)


_PROBLEMS = {
    "label": "single_label_classification",
    "labels": "multi_label_classification",
    "target": "regression",
}
"""The `problem_type` of transformers, by the field that a network predicts."""


def write_adapter(settings: Export, config: Config, model: nnx.Module) -> str:
    """Writes the adapters of a run's model to a folder that PEFT reads, and returns a sentence about it.

    Raises:
      UsageError: the run has no adapters, or trained other parameters too, or `export_adapter` raises.
    """
    if not config.training.lora:
        raise UsageError("--what adapter: the run has no adapters (--training.lora); write --what weights")
    if config.training.lora_trained:
        raise UsageError(
            f"--what adapter: the run also trained {' '.join(config.training.lora_trained)}, which an adapter's file "
            "would lack; write --what weights"
        )
    from mpjax.models.pretrained.peft import export_adapter  # local, because few runs have adapters

    kinds = {
        "embedding": "FEATURE_EXTRACTION",
        "text_to_text": "SEQ_2_SEQ_LM",  # none for transcription: PEFT's class of it takes tokens, not sounds
        **dict.fromkeys(NEXT_TOKEN, "CAUSAL_LM"),
    }
    kind = kinds.get(config.task)
    dtype = settings.dtype or "float32"
    count = export_adapter(model, settings.output, base=config.model.weights, task=kind, dtype=dtype)
    return (
        f"adapters of {config.model.weights or 'initial weights'}, {count:,} numbers in {dtype}, in {settings.output}"
        + _told_of_base(config.training.lora_base)
    )


def _told_of_base(base: str) -> str:
    """Says that adapters were trained on rounded weights, over which alone outputs are those of the run."""
    if base in ("policy", "float32"):
        return ""
    return (
        f"; trained on weights in {base}: over those of the file, outputs differ by their rounding; the merged weights "
        "of --what weights have it"
    )


def write_program(
    settings: Export,
    config: Config,
    plan: PrecisionPlan,
    source: Source,
    task: Task,
    params: Arrays,
    stats: Arrays,
) -> str:
    """Exports the program of a model in evaluation, compares it with the model on test examples, and writes it.

    The program is a serialised `jax.export.Exported`. It takes a dict of the inputs of the task, [B, ...] with any B
    but fixed other axes, as evaluation reads them before normalisation, and returns the logits; of a regression, the
    numbers in the units of the data, float32. Tables have a `row` in place of the image. It computes under the
    policy of `plan`. The program is read back, and its logits are compared on up to `_COMPARED` examples, before the
    file is written.

    Returns:
      A sentence about the file.

    Raises:
      UsageError: the task is the user's own, products are in MX blocks, JAX cannot export the model, or a logit differs
        by more than `_ROUNDING` of the largest logit. Then no file is written.
    """
    if config.task in ("diffusion", "own"):
        raise UsageError(f"--what program: a run with --task {config.task} has no logits that mpjax knows")
    if blocks := sorted(str(recipe) for recipe in plan.policy.recipes if recipe.scaling == "block"):
        raise UsageError(
            f"--what program: JAX cannot export products in {blocks[0]}: they call a kernel for one GPU, which is not "
            "among those that a stored program may call; write --policy mixed_float8 or mixed_bfloat16"
        )
    logits_of = logits_for(config.task, task.objective.prepare, plan.module_policy)
    returned = "vectors" if config.task in COMPARED else "logits"
    if config.task == "regression":
        target: Any = source.fields["target"]
        logits_of, returned = _in_units(logits_of, target), f"numbers ({', '.join(target.columns)})"
    _, of_batch = in_evaluation(task.structure, logits_of, cast=task.cast, layout=None)
    params, stats = jax.device_get((params, stats))  # on one device, whatever the mesh of this machine

    def program(batch):
        return of_batch(params, stats, batch)

    split = SplitOfOne(source.test, reader(source, config.data, training=False))
    examples = split.batch(range(min(_COMPARED, len(split))))
    batch = {name: examples[name] for name in inputs_of(config.task, examples)}
    if config.task in NEXT_TOKEN:
        batch["tokens"] = batch["tokens"][:, :-1]  # the last token is only a label
    (size,) = export.symbolic_shape("batch")
    shapes = {name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype) for name, array in batch.items()}
    try:
        exported = export.export(jax.jit(program), platforms=settings.platforms, disabled_checks=_KNOWN)(shapes)
    except Exception as error:  # an error of the model's own code, or of JAX
        raise UsageError(f"--what program: JAX cannot export {config.model.name}: {first_line(error)}") from error
    path, written = expanded(settings.output), bytes(exported.serialize())

    logits = np.asarray(export.deserialize(bytearray(written)).call(batch), np.float64)
    expected = np.asarray(jax.jit(program)(batch), np.float64)
    difference, largest = np.max(np.abs(logits - expected)), np.max(np.abs(expected))
    if not difference <= _ROUNDING * largest:
        raise UsageError(
            f"--what program: on {len(logits)} test examples the program's logits differ from the model's by "
            f"{difference:.3g}, of {largest:.3g}; write --policy float32"
        )
    write_atomically(path, written)
    takes = ", ".join(f"{name} {_shown(array)}" for name, array in batch.items())
    return (
        f"{path}, {len(written):,} bytes for {', '.join(settings.platforms)}: {takes} to {returned} "
        f"{_shown(exported.out_avals[0])} under {plan.policy}; at most {difference:.2g} from the model's on "
        f"{len(logits)} test examples"
        + ("; columns.json of the run says how a row is made of its columns" if "row" in batch else "")
    )


def _in_units(logits_of: Callable, target: Any) -> Callable:
    """The outputs of a regression in the units of the data, float32: they leave the model standardised."""

    def numbers(model, batch) -> jax.Array:
        outputs = logits_of(model, batch).astype(np.float32)
        return outputs * np.asarray([target.std], np.float32) + np.asarray([target.mean], np.float32)

    return numbers


def _shown(array: Any) -> str:
    return f"{array.dtype}[{', '.join(['B', *map(str, array.shape[1:])])}]"


_KNOWN = (export.DisabledSafetyCheck.custom_call("LayoutConstraint"),)
"""Transformers ask XLA for the layout of their activations. JAX does not guarantee this call for files, but XLA has it
on all platforms.
"""

_COMPARED = 8

_ROUNDING = 0.02
"""The largest difference, as a share of the largest logit: in half precision, another program rounds differently."""
