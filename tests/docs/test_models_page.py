"""The tables of docs/models.md say what the registry of models, the tasks and the settings say."""

import inspect
import pathlib
import re

import jax
import pytest
from flax import nnx

from mpjax.config import MODELS, TASKS, Data, Model, load_config
from mpjax.config import schema as inputs
from mpjax.data import Image, Label, Length, Mask, Tokens
from mpjax.models import ENTRIES, build_model


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def rows(heading):
    """The cells of the first table below a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TABLE = {row[0].strip("`"): row for row in rows("Models")}


def quoted(cell):
    return set(re.findall(r"`(\w+)`", cell))


def test_the_table_has_every_model():
    assert list(TABLE) == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_of_a_model_are_those_it_takes(name):
    assert quoted(TABLE[name][3]) == set(ENTRIES[name].settings)


@pytest.mark.parametrize("name", MODELS)
def test_the_configurations_of_a_model_are_of_it_and_of_its_task(name):
    for file in re.findall(r"\(\.\./(configs/\w+\.toml)\)", TABLE[name][4]):
        config = load_config(["--config", str(ROOT / file)])
        assert (config.model.name, config.task.replace("_", " ")) == (name, TABLE[name][1].replace("ll", "l"))


def test_every_configuration_is_in_the_table_or_on_a_page_of_folders_if_its_model_is_one():
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("networks_for_*.md")))
    named = set(re.findall(r"\(\.\./configs/(\w+\.toml)\)", "\n".join(row[4] for row in TABLE.values())))
    of_folders = set(re.findall(r"\(\.\./configs/(\w+\.toml)\)", pages)) - named
    assert named | of_folders == {path.name for path in (ROOT / "configs").glob("*.toml")}
    for file in of_folders:
        assert load_config(["--config", str(ROOT / "configs" / file)]).model.folder


FIELDS = {
    "classification": {"image": Image((224, 224, 3)), "label": Label(1000)},
    "segmentation": {"image": Image((224, 224, 3)), "mask": Mask((224, 224), 1)},
    "text classification": {"tokens": Tokens(512, 30522), "length": Length(512), "label": Label(2)},
    "language modelling": {"tokens": Tokens(1025, 50257)},
    "diffusion": {"image": Image((224, 224, 3)), "label": Label(1000)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mlp"])
def test_the_parameters_are_those_of_the_model_as_settings_build_it(name):
    fields = FIELDS[TABLE[name][1]]
    if name.startswith("wrn"):
        fields = {**fields, "label": Label(10)}
    config = Model(name=name, stem="imagenet", pool="cls")
    model = nnx.eval_shape(lambda: build_model(config, fields=fields, rngs=nnx.Rngs(0)))
    if name == "bert":
        del model.head
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert f"{count:,}" == TABLE[name][2]


def test_the_tasks_are_all_there_with_the_metric_that_decides():
    found = {row[0].strip("`"): quoted(row[3]) for row in rows("Tasks")}
    assert found == {name: {kind.score} for name, kind in TASKS.items()}


def test_every_augmentation_is_a_setting_and_every_such_setting_is_there():
    named = {flag for row in rows("Augmentations") for flag in re.findall(r"--data\.(\w+)", row[0])}
    assert named <= set(vars(Data()))
    source = inspect.getsource(inputs)
    assert named == set(re.findall(r'^    (\w+): [^\n]+\n    """Augmentation', source, re.MULTILINE))
