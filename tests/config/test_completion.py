"""What bash completes after `eval "$(mpjax --print-completion bash)"`."""

import re
import subprocess

import pytest

from mpjax import cli
from mpjax.config.completion import flags_of, script
from mpjax.config.plan import Plan
from mpjax.config.schema import Config
from mpjax.errors import UsageError


@pytest.fixture(scope="module")
def completed():
    """Completes the last of the words, as bash does after a tab."""
    text = script(
        "bash", {name: [cli._named(kind) for kind in command.settings] for name, command in cli.COMMANDS.items()}
    )

    def complete(*words):
        ask = 'shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mpjax_complete; printf "%s " "${COMPREPLY[@]}"'
        command = ["bash", "-uc", f"{text}\n{ask}", "bash", "-", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    return complete


def test_commands_and_options_of_the_program(completed):
    assert completed("mpjax", "tr") == ["train", "train_ray"]
    assert completed("mpjax", "--v") == ["--version"]


def test_flags_of_a_command(completed):
    assert completed("mpjax", "train", "--precision.p") == ["--precision.patience", "--precision.policy"]
    assert completed("mpjax", "evaluate", "--po") == ["--policy"]
    assert completed("mpjax", "evaluate", "--precision.pol") == []
    assert completed("mpjax", "plan", "--conf") == ["--config"]


def test_values_of_a_flag_also_behind_others(completed):
    assert completed("mpjax", "plan", "--model.name", "mlp", "--gpu", "a100", "h") == ["h100", "h200"]
    assert completed("mpjax", "train", "--model.name", "resnet1") == ["resnet18", "resnet101", "resnet152"]


def test_files_are_left_to_bash(completed):
    assert completed("mpjax", "train", "--config", "conf") == []


def test_every_flag_of_the_help_is_completed(capsys):
    assert cli.train(["--help"]) == 0
    helped = set(re.findall(r"(?<![\w`])--[\w.]+(?=[ ,])", capsys.readouterr().out)) - {"--help", "--config"}
    assert helped - {flag for flag, _ in flags_of(Config)} == set()


def test_flags_and_their_choices():
    found = dict(flags_of(Plan))
    assert (found["--fit"], found["--no_fit"], found["--attention"]) == ((), (), ["auto", "xla", "cudnn"])


@pytest.mark.parametrize("shell", ["", "csh"])
def test_other_shells_are_refused(shell):
    with pytest.raises(UsageError, match="wanted bash"):
        script(shell, {})
