"""The command line of a plan."""

import pytest

from mpjax.config import Config, Plan, load_settings
from mpjax.errors import UsageError


def loaded(line: str):
    return load_settings((Plan, Config), line.split(), prog="plan.py")


def test_flags_of_the_plan_and_of_the_run_are_told_apart():
    settings, config = loaded(
        "--data.batch_size 256 --gpu h200 a100 --policies float32 mixed_bfloat16 --model.name resnet50 --devices 8 "
        "--attention cudnn --no_fit --json --plot plan.png --memory_fraction 0.9 --vocabulary 9 --no_measure --verify"
    )
    assert settings == Plan(
        gpu=("h200", "a100"),
        policies=("float32", "mixed_bfloat16"),
        devices=8,
        attention="cudnn",
        fit=False,
        json=True,
        plot="plan.png",
        memory_fraction=0.9,
        vocabulary=9,
        measure=False,
        verify=True,
    )
    assert (config.data.batch_size, config.model.name) == (256, "resnet50")


def test_files_say_which_run(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[data]\nbatch_size = 12\n[precision]\npolicy = 'float32'\n")
    _, config = loaded(f"--gpu l4 --config {file} --data.length 7")
    assert (config.data.batch_size, config.precision.policy, config.data.length) == (12, "float32", 7)


def test_without_more_the_default_run_is_planned():
    settings, config = loaded("--gpu b200")
    assert settings == Plan(gpu=("b200",), policies=(), devices=1, attention="auto", memory_fraction=0.75, vocabulary=0)
    assert (settings.fit, settings.verify, settings.measure, settings.plot, settings.json) == (
        True,
        False,
        True,
        "",
        False,
    )
    assert config == Config()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpu h300", "invalid choice 'h300'"),
        ("--gpu h200 --attention flash", "invalid choice 'flash'"),
        ("--gpu h200 --data.batchsize 4", "--data.batch_size"),
    ],
)
def test_a_wrong_flag_is_reported(line, said):
    with pytest.raises(UsageError, match=said):
        loaded(line)


def test_a_compiler_can_be_installed_without_a_plan():
    settings, _ = loaded("--install")
    assert (settings.install, settings.gpu) == (True, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--gpu", "--gpu is empty: wanted one or more"),
        ("--devicx", r"^unrecognized option --devicx; did you mean --devices\?"),
        ("--gpux h100", r"^unrecognized option --gpux; did you mean --gpu\?"),
        ("--no_verifx", r"^unrecognized options: --no_verifx"),
        ("--stepz 3", r"^unrecognized options: --stepz, 3; did you mean --steps\?"),
        ("--model.name mlp", "--gpu is empty: wanted one or more, such as h100"),
        ("--gpu h200 --plot a.xyz", "--plot a.xyz ends in '.xyz': wanted .png"),
        ("--gpu h200 a100 h200", "--gpu has h200 twice"),
        ("--gpu h200 --policies float32 float32", "--policies has float32 twice"),
        ("--gpu h200 --devices 0", "--devices is 0: wanted at least 1"),
        ("--gpu h200 --vocabulary -1", "--vocabulary is -1: wanted 0 or more"),
        ("--gpu h200 --memory_fraction 0", "--memory_fraction is 0.0: wanted a share above 0, at most 1"),
        ("--gpu h200 --memory_fraction 1.5", "--memory_fraction is 1.5"),
        ("--gpu h200 --config nowhere.toml", "no config file nowhere.toml"),
        ("--gpu h200 --search mesh", "--search mesh divides several GPUs, and --devices is 1: write --devices 8"),
        (
            "--gpu h200 --search mesh --devices 8 --mesh.fsdp 4",
            "--mesh.fsdp 4 is what --search mesh chooses: leave it out",
        ),
        (
            "--gpu h200 --search mesh --devices 8 --policies float32 bfloat16",
            "--policies has 2: write --policies float32",
        ),
        ("--gpu h200 --search mesh --devices 8 --receipt", "--receipt is for one mesh"),
        ("--gpu h200 --search mesh --devices 8 --verify", "--verify is for one mesh"),
        ("--gpu h200 --search mesh --devices 8 --xla xla_a=1", "--xla is for one mesh"),
        ("--gpu h200 --search mesh --devices 8 --costliest 5", "--costliest 5 is for one mesh"),
        ("--gpu h200 --search fsdp", "invalid choice 'fsdp'"),
    ],
)
def test_settings_that_make_no_plan_are_refused(line, message):
    with pytest.raises(UsageError, match=message):
        loaded(line)
