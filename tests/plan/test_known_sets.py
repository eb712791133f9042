"""What batches hold, without their data sets."""

import pytest

from mpjax import data
from mpjax.commands import fields_of
from mpjax.config import data_folder, from_toml, load_config
from mpjax.data import Image, Label, Length, Mask, Tokens
from mpjax.errors import UsageError
from mpjax.plan import KNOWN


def of_flags(flags: str, **settings):
    return fields_of(load_config(flags.split()), **settings)


def test_imagenet_is_known_and_has_the_size_that_is_asked_for():
    found = of_flags("--data.name imagenet2012 --data.image_size 224")
    assert found == {"image": Image((224, 224, 3)), "label": Label(1000)}


def test_images_of_several_sizes_need_one():
    with pytest.raises(UsageError, match="write --data.image_size 224"):
        of_flags("--data.name imagenet2012")


def test_a_version_behind_the_name_is_no_other_set():
    assert of_flags("--data.name cifar100/3.0.2") == {"image": Image((32, 32, 3)), "label": Label(100)}


def test_generated_images_say_their_shape():
    assert of_flags("--data.name synthetic:16x24x3:7") == {"image": Image((16, 24, 3)), "label": Label(7)}


def test_masks_have_the_size_of_their_images_and_the_classes_that_are_asked_for():
    found = of_flags("--task segmentation --data.name oxford_iiit_pet --data.image_size 64 --data.num_classes 3")
    assert found == {"image": Image((64, 64, 3)), "mask": Mask((64, 64), 3)}


def test_texts_have_the_tokens_of_their_tokenizer():
    sst2 = "--task text_classification --data.name glue/sst2 --data.length 64 --data.tokenizer "
    bert = of_flags(sst2 + "google-bert/bert-base-uncased")
    assert bert == {"tokens": Tokens(64, 30522), "length": Length(64), "label": Label(2)}
    assert of_flags(sst2 + "/nowhere/tokenizer.json", vocabulary=777)["tokens"] == Tokens(64, 777)
    with pytest.raises(UsageError, match="write --vocabulary N"):
        of_flags(sst2 + "/nowhere/tokenizer.json")


def test_a_language_model_is_given_one_token_more_than_it_predicts():
    found = of_flags("--task language_modeling --data.name docstrings --data.length 32 --data.tokenizer bytes")
    assert found == {"tokens": Tokens(33, 259)}


def test_an_unknown_set_is_refused_with_what_to_write_instead():
    with pytest.raises(UsageError, match="synthetic:64x64x3:20 .height x width x channels : classes.") as raised:
        of_flags("--data.name my_set --data.image_size 64 --data.num_classes 20")
    assert "data set 'my_set' is not prepared" in str(raised.value)


def test_a_task_of_other_fields_is_refused():
    with pytest.raises(
        UsageError, match="--data.name cifar10 contains images, but --task language_modeling needs texts"
    ):
        of_flags("--data.name cifar10 --task language_modeling")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "digits_canvas"])
def test_the_table_says_what_the_set_itself_says(name):
    task = "segmentation" if name == "digits_canvas" else "classification"
    config = load_config(["--data.name", name, "--task", task])
    source = data.open_source(config.data, data_folder(config), config.task)
    assert fields_of(config) == data.batch_fields(source, config.data)


def test_every_shipped_configuration_can_be_planned_without_its_data(pytestconfig):
    for file in sorted((pytestconfig.rootpath / "configs").glob("*.toml")):
        config = from_toml(file)
        if config.model.folder:  # which its user makes: docs/nanochat.md
            continue
        assert config.data.name in KNOWN
        assert fields_of(config)
