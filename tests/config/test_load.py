"""Files and flags through one strict parser."""

import contextlib
import re
import shlex
import time
import tomllib

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.config import REMOVED, Config, Duration, Plan, from_toml, load_config, load_settings, to_toml
from mpjax.errors import UsageError


@pytest.fixture
def file(tmp_path):
    """Writes a TOML file and gives its path."""

    def write(text, name="a.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_nothing_gives_the_default_task():
    assert load_config([]) == Config()


def test_flags_win_over_later_files_over_earlier_files(file):
    first = file("seed = 1\nsteps = '3 epochs'\n[optimizer]\nname = 'adamw'\nlearning_rate = 0.5\n", "first.toml")
    second = file("seed = 2\n[optimizer]\nlearning_rate = 0.25\n", "second.toml")
    config = load_config(["--seed", "3", "--config", first, f"--config={second}"])
    assert config.seed == 3
    assert config.optimizer.learning_rate == 0.25
    assert config.optimizer.name == "adamw"
    assert config.steps == Duration(3, "epochs")


def test_an_empty_table_overrides_an_earlier_file_as_an_empty_list_does(file):
    first = file(
        "[precision.rules]\nstem = 'float32'\n[optimizer.rates]\nb = 2.0\n[training]\nfreeze = ['b']\n", "first.toml"
    )
    second = file("[precision.rules]\n[optimizer]\nrates = {}\n[training]\nfreeze = []\n", "second.toml")
    assert load_config(["--config", first, "--config", second]) == Config()


def test_every_kind_of_value_is_read_from_a_file(file):
    config = from_toml(
        file(
            "output_dir = ''\nseed = 7\n[data]\nmean = [-0.5, 0.25, 1e-3]\nflip = true\n[optimizer]\n"
            "warmup = 12\nlearning_rate = 1\n[report]\nplot = false\n"
            "[precision]\ninitial_scale = 1024\n[precision.rules]\n'stem/*' = 'float32'\n'type:Linear' = 'bfloat16'\n"
        )
    )
    assert config.data.mean == (-0.5, 0.25, 0.001)
    assert (config.seed, config.data.flip, config.report.plot, config.output_dir) == (7, True, False, "")
    assert (config.optimizer.learning_rate, config.optimizer.warmup) == (1.0, Duration(12))
    assert list(config.precision.rules.items()) == [("stem/*", "float32"), ("type:Linear", "bfloat16")]


def test_rules_as_flags_replace_those_of_a_file(file):
    path = file("[precision.rules]\n'stem/*' = 'float32'\n")
    config = load_config(["--config", path, "--precision.rules", "head", "float32", "stem/*", "bfloat16"])
    assert config.precision.rules == {"head": "float32", "stem/*": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[optimizer]\nlerning_rate = 0.1", "--optimizer.learning_rate"),
        ("[optimiser]\nlearning_rate = 0.1", "--optimizer.learning_rate"),
        ("[optimiser]", "unrecognized options: --optimiser"),
        ("steppes = 3", "unrecognized options: --steppes=3"),
        ("[optimizer]\nlearning_rate = 'fast'", "could not convert string to float"),
        ("seed = 1.5", "--seed"),
        ("seed = true", "seed is True: wanted a number or a word, not true or false"),
        ("[report]\nplot = 'yes'", "report.plot is 'yes': wanted true or false"),
        ("data = 'digits'", "data is 'digits': wanted a table"),
        ("[steps]\nepochs = 3", "wanted one value, not a table"),
        ("[precision]\nrules = 'stem'", "precision.rules is 'stem': wanted a table"),
        ("[model]\nname = 'resnet19'", "no model 'resnet19'; did you mean resnet18?"),
        ("steps = '30 weeks'", "bad duration '30 weeks': wanted e.g. '500'"),
        ("steps = = 3", "is not TOML: Invalid value"),
    ],
)
def test_a_mistake_in_a_file_is_reported_under_its_name(file, text, says):
    path = file(text, "mistaken.toml")
    with pytest.raises(UsageError) as raised:
        load_config(["--config", path])
    message = " ".join(str(raised.value).split())
    assert "mistaken.toml" in message
    assert says in message


def test_a_mistake_is_not_reported_of_a_file_without_one(file):
    mistaken = file("[optimizer]\nlerning_rate = 0.1", "mistaken.toml")
    with pytest.raises(UsageError, match="mistaken.toml") as raised:
        load_config(["--config", file("seed = 1", "good.toml"), "--config", mistaken])
    assert "good.toml" not in str(raised.value)


@pytest.mark.parametrize("name", REMOVED)
def test_a_file_may_have_a_setting_of_an_earlier_version_at_its_default(file, name):
    section, _, setting = name.rpartition(".")
    path = file(tomli_w.dumps({"seed": 3, section: {setting: REMOVED[name].default}}), "earlier.toml")
    assert load_config(["--config", path]) == Config(seed=3)


@pytest.mark.parametrize("value", ["true", "0", "''", "{}"])
def test_a_setting_of_an_earlier_version_with_another_value_is_an_error(file, value):
    with pytest.raises(UsageError, match=r"earlier\.toml: .*--precision\.tune"):
        load_config(["--config", file(f"[precision]\ntune = {value}", "earlier.toml")])


def test_a_flag_of_an_earlier_version_is_an_error_that_says_what_to_write():
    with pytest.raises(UsageError) as caught:
        load_config(["--precision.tune", "--seed", "3"], prog="train")
    assert str(caught.value) == (
        "unrecognized options: --precision.tune; write --precision.rules with the rules that "
        "examples/tune_products.py of mpjax's repository prints (train --help lists all)"
    )


@pytest.mark.parametrize("head", ["", "[data]\n", "[nothing]\n"])
def test_ten_thousand_unknown_settings_take_no_two_seconds(file, head):
    path = file(head + "\n".join(f"unknown_{number} = {number}" for number in range(10_000)), "many.toml")
    start = time.process_time()
    with pytest.raises(UsageError, match=r"in .*many\.toml"):
        load_config(["--config", path])
    assert time.process_time() - start < 2


def test_a_missing_file_is_named_with_the_nearest(file, tmp_path):
    file("", "digits.toml")
    with pytest.raises(UsageError, match=rf"no config file {tmp_path}/digit.toml; did you mean {tmp_path}/digits.toml"):
        load_config(["--config", str(tmp_path / "digit.toml")])
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        load_config(["--config", str(tmp_path)])


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--seed", "1"]])
def test_config_needs_a_file(argv):
    with pytest.raises(UsageError, match="--config needs a file or the name of a shipped one, as in --config digits"):
        load_config(argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--optimizer.lerning_rate", "3"], "did you mean --optimizer.learning_rate"),
        (["--seed", "x"], "--seed: invalid literal"),
        (["--seed"], "--seed"),
        (["--model.name", "resnet19"], "no model 'resnet19'; did you mean resnet18?"),
        (["--steps", "-5"], "bad duration '-5'"),
        (["--loop.log_every=3 weeks"], "bad duration '3 weeks'"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_flag_is_named_in_the_first_line(argv, says):
    with pytest.raises(UsageError) as raised:
        load_config(argv)
    assert says in str(raised.value).splitlines()[0]


def test_resuming_starts_from_the_runs_own_settings(file, tmp_path):
    file("seed = 5\nsteps = 100\noutput_dir = 'elsewhere'\n[optimizer]\nlearning_rate = 0.5\n", "config.toml")
    other = file("[optimizer]\nname = 'adamw'\n", "other.toml")
    config = load_config(["--config", other, "--resume", "--output_dir", str(tmp_path), "--steps", "200"])
    assert (config.seed, config.steps, config.optimizer.learning_rate) == (5, Duration(200), 0.5)
    assert (config.optimizer.name, config.output_dir, config.resume) == ("adamw", str(tmp_path), True)


def test_a_damaged_config_of_the_run_is_named(file, tmp_path):
    path = file("sed = 5", "config.toml")
    with pytest.raises(UsageError, match=path):
        load_config(["--resume", "--output_dir", str(tmp_path)])


def test_resuming_needs_to_know_the_run():
    with pytest.raises(UsageError, match="--resume needs --output_dir: the folder of the run to resume"):
        load_config(["--resume"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty; wanted settings"),
        (" \n\t", "the file is empty; wanted settings"),
        ("a = " + "[" * 100_000, "is not TOML: "),
        ("a." * 5_000 + "b = 1", "is not TOML: "),
        ('output_dir = "a\\u0000b"', r"output_dir is 'a\\x00b': wanted a text without NUL"),
    ],
)
def test_files_that_hold_no_settings_are_refused(tmp_path, text, says):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        load_config(["--config", str(tmp_path / "a.toml")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed = " + "1" * 5000, "a.toml is not TOML: Exceeds the limit"),
        (
            "[data]\nmask_values = [1, '--seed=5']",
            "in .*a.toml: data.mask_values has '--seed=5', which would be read",
        ),
        (
            "[precision.rules]\n'--seed' = '7'",
            "in .*a.toml: precision.rules has '--seed', which would be read",
        ),
        ("[data]\n'name=x' = 'y'", "in .*a.toml: data.name=x is not a setting; train.py --help lists all"),
    ],
)
def test_what_the_parser_would_read_as_another_setting_is_refused(file, text, says):
    with pytest.raises(UsageError, match=says):
        from_toml(file(text))


@pytest.mark.parametrize("name", ["tyro-write-completion", "tyro_write_completion"])
def test_a_file_of_settings_writes_no_file(file, tmp_path, name):
    path = file(f"{name} = ['bash', '{tmp_path}/written']")
    with pytest.raises(UsageError, match=f"in {path}: {name} is not a setting"):
        from_toml(path)
    assert not (tmp_path / "written").exists()


def test_a_home_folder_of_nobody_is_named():
    with pytest.raises(UsageError, match="^~nobody_here/x: ~nobody_here has no home folder; write the folder itself"):
        load_config(["--resume", "--output_dir", "~nobody_here/x"])


ENTRIES = [
    (section, name)
    for section, table in tomllib.loads(to_toml(Config())).items()
    for name in (table if isinstance(table, dict) else [""])
]
WORDS = st.text(max_size=8) | st.sampled_from(["--seed=1", "--help", "-h", "~", "[red]", "%s", "{}", "1e999", "nan"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.just(10**400) | st.dates()
TOML_VALUES = st.recursive(
    PLAIN.filter(lambda value: value is not None),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.sampled_from(ENTRIES), TOML_VALUES, st.none() | WORDS)
def test_whatever_one_setting_of_a_file_is_the_file_is_read_or_named(tmp_path_factory, entry, value, renamed):
    whole = tomllib.loads(to_toml(Config()))
    section, name = entry
    table = whole[section] if name else whole
    del table[name or section]
    table[(name or section) if renamed is None else renamed] = value
    path = tmp_path_factory.mktemp("fuzz") / "fuzzed.toml"
    with contextlib.suppress(UnicodeEncodeError, ValueError):  # what TOML cannot write
        path.write_text(tomli_w.dumps(whole))
    if path.exists():
        with named_unless_read(path):
            assert isinstance(from_toml(path), Config)


@settings(max_examples=10)
@given(st.binary(max_size=3), st.integers(0, 3000), st.integers(0, 3))
def test_whatever_bytes_stand_in_a_file_it_is_read_or_named(tmp_path_factory, written, at, dropped):
    content = to_toml(Config()).encode()
    path = tmp_path_factory.mktemp("fuzz") / "fuzzed.toml"
    path.write_bytes(content[:at] + written + content[at + dropped :])
    with named_unless_read(path):
        assert isinstance(from_toml(path), Config)


@contextlib.contextmanager
def named_unless_read(path):
    said = str(path)
    try:
        yield
    except UsageError as error:
        said = str(error)
    assert str(path) in said


ARGUMENTS = st.lists(
    st.sampled_from(["--seed", "--steps", "--data.mean", "--precision.rules", "--resume", "--output_dir", "--config"])
    | st.sampled_from(["--report.no_plot", "--optimizer.name=", "--model.name", "--", "-", "-h", "1", "~a/b", "."])
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
    max_size=5,
)


@settings(max_examples=8)
@given(ARGUMENTS)
def test_whatever_the_arguments_they_are_settings_or_one_message(arguments):
    try:
        found = load_config(arguments)
    except UsageError as error:
        found = str(error)
    except SystemExit as stopped:
        found = stopped.code
    assert found in (0, 2) or (found and isinstance(found, Config | str))


def test_a_word_of_a_table_or_list_is_no_flag_either(file):
    """`-h` would print the help and end the program with exit code 0."""
    for text in (
        "[optimizer.arguments]\n'-h' = '1'",
        "[optimizer.arguments]\nb2 = '-x'",
        "[training]\nfreeze = ['-h']",
    ):
        with pytest.raises(UsageError, match="which would be read as a flag"):
            load_config(["--config", file(text, "short.toml")])
    assert load_config(["--config", file("[data]\nmean = [-0.5]", "mean.toml")]).data.mean == (-0.5,)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("--lr 0.1", "--optimizer.learning_rate 0.1"),
        ("--learning-rate=0.1", "--optimizer.learning_rate 0.1"),
        ("--batch-size 32", "--data.batch_size 32"),
        ("--epochs 3", "--steps '3 epochs'"),
        ("--wd 0.1", "--optimizer.weight_decay 0.1"),
        ("--fp16", "--precision.policy mixed_float16"),
        ("--bf16 --steps 3", "--precision.policy mixed_bfloat16"),
        ("--arch vit_b16", "--model.name vit_b16"),
        ("--dataset digits", "--data.name digits"),
        ("--data digits", "--data.name digits"),
        ("--max-steps 7", "--steps 7"),
        ("--max_steps=7", "--steps 7"),
        ("--max_epochs 3", "--steps '3 epochs'"),
        ("--scheduler linear", "--optimizer.schedule linear"),
        ("--lr_scheduler=constant", "--optimizer.schedule constant"),
        ("--lr-scheduler-type cosine", "--optimizer.schedule cosine"),
        ("--lr_scheduler step", "--optimizer.schedule VALUE"),
        ("--lr fast", "--optimizer.learning_rate VALUE"),
        ("--lr -1", "--optimizer.learning_rate VALUE"),
        ("--precision bf16", "--precision.policy bf16"),
        ("--precision 16-mixed", "--precision.policy 16-mixed"),
        ("--wandb", "--report.writers wandb"),
        ("--report_to mlflow comet", "--report.writers mlflow comet"),
        ("--output 'my run'", "--output_dir 'my run'"),
        ("--log-dir x", "--output_dir x"),
        ("--num_workers 4", "--data.workers 4"),
        ("--weight_decay 0.1", "--optimizer.weight_decay 0.1"),
        ("--momentum 0.5", "--optimizer.momentum 0.5"),
        ("--optimizer adamw", "--optimizer.name adamw"),
        ("--mean 0.5 0.4 0.3", "--data.mean 0.5 0.4 0.3"),
        ("--flip", "--data.flip"),
        ("--no-plot", "--report.no_plot"),
        ("--dropout", "--model.dropout VALUE"),
        ("--warmup_epochs 2", "--optimizer.warmup '2 epochs'"),
        ("--gradient_accumulation_steps 2", "--training.accumulate 2"),
        ("--max_grad_norm 1.0", "--optimizer.clip_norm 1.0"),
        ("--random-seed 3", "--seed 3"),
    ],
)
def test_a_flag_as_other_programs_call_it_is_named_as_here(flags, instead):
    with pytest.raises(UsageError) as caught:
        load_config(shlex.split(flags), prog="train")
    flag = re.split("[ =]", flags)[0]
    assert re.fullmatch(
        rf"unrecognized options: {flag}\S*; write {instead} \(train --help lists all\)", str(caught.value)
    )
    if "VALUE" not in instead:
        load_config(shlex.split(instead))


@pytest.mark.parametrize("flag", ["--gpu", "--gpus=2", "--device cuda:0", "--devices 0,1", "--num-gpus 2", "--cuda"])
def test_a_flag_for_devices_has_no_equal_but_the_environment(flag):
    with pytest.raises(UsageError, match="leave it out.*CUDA_VISIBLE_DEVICES=0 before the command.*JAX_PLATFORMS=cpu"):
        load_config(shlex.split(flag))


def test_each_of_several_flags_of_other_programs_has_its_advice():
    with pytest.raises(UsageError) as caught:
        load_config(["--lr", "1", "--steps", "nine", "--epochs", "3"], prog="train")
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("unrecognized options: --lr; write --optimizer.learning_rate 1 ")
    assert second.startswith("unrecognized options: --epochs; write --steps '3 epochs' ")
    assert "bad duration 'nine'" in third


def test_a_command_with_a_flag_for_devices_names_its_own():
    with pytest.raises(UsageError, match="unrecognized option --device; did you mean --gpu?"):
        load_settings((Plan, Config), ["--device", "h100"], prog="plan")
