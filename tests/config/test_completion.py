"""What bash and zsh complete after `eval "$(mpjax --print-completion bash)"`."""

import re
import shutil
import subprocess

import pytest

from mpjax import cli
from mpjax.config import SHELLS, Config, Plan, flags_of, script
from mpjax.errors import UsageError


HERE = [shell for shell in SHELLS if shutil.which(shell)]


@pytest.fixture(scope="module", params=HERE)
def completed(request):
    """Completes the last of the words, as a shell of this machine does after a tab."""
    shell = request.param
    kinds = {name: [cli.imported(kind) for kind in command.settings] for name, command in cli.COMMANDS.items()}
    text = script(shell, kinds)
    # As zsh runs a function that completes for bash.
    within = {"bash": "", "zsh": "emulate -L sh; setopt kshglob noshglob braceexpand;"}[shell]

    def complete(*words):
        ask = 'shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mpjax_complete; printf "%s " "${COMPREPLY[@]}"'
        asked = f'asked() {{ {within} {ask}; }}; asked "$@"'
        command = [shell, "-fc" if shell == "zsh" else "-uc", f"{text}\n{asked}", shell, "-", *words]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return found if shell == "bash" else [word for word in found if word.startswith(words[-1])]  # as zsh does

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


def test_files_are_left_to_the_shell(completed):
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
