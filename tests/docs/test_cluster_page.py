"""The files of docs/cluster, run with stand-ins for srun and python, and the commands of the README for two shells."""

import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys

import pytest
import yaml

from mpjax.config import Config, Distributed, load_config, save_config


ROOT = pathlib.Path(__file__).parents[2]
FILES = ROOT / "docs" / "cluster"
COORDINATOR = "mpjax-node-0-0.mpjax:1234"


@pytest.fixture
def shell(tmp_path):
    """Runs a script in bash, with /shared in a temporary folder.

    Returns its exit code and what was called. A stand-in for a program writes its arguments and ends with `code`.
    """
    calls, programs = tmp_path / "calls", tmp_path / "programs"
    programs.mkdir()

    def run_script(script, code=0, **variables):
        calls.write_text("")
        for name in ("python", "srun", "scontrol"):
            (programs / name).write_text(f'#!/bin/bash\necho {name} "${{@@Q}}" >> {calls}\nexit {code}\n')
            (programs / name).chmod(0o755)
        environment = {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
        script = script.replace("/shared", str(tmp_path))
        done = subprocess.run(["bash", "-c", script], env=environment, cwd=ROOT, check=False)
        return done.returncode, [shlex.split(line) for line in calls.read_text().splitlines()]

    return run_script


def config_of(call):
    """The settings that the real parser makes of a call of train.py."""
    words = call[call.index("scripts/train.py") + 1 :]
    return load_config(words)


def begun(folder):
    """Leaves what a run leaves that has begun."""
    folder.mkdir(parents=True)
    save_config(Config(seed=7), folder / "config.toml")


JOB = {"SLURM_JOB_NAME": "mpjax", "SLURM_JOB_ID": "12"}


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_sbatch_file_starts_a_run_in_a_folder_of_the_job(shell, tmp_path):
    code, (call,) = shell((FILES / "train.sbatch").read_text(), **JOB)
    config = config_of(call)
    assert (code, call[:3]) == (0, ["srun", "python", "scripts/train.py"])
    assert config.output_dir == str(tmp_path / "runs" / "mpjax-12")
    assert (config.model.name, config.resume, config.distributed) == ("resnet50", False, Distributed())


def test_the_sbatch_file_resumes_a_run_and_is_queued_again_after_sigterm(shell, tmp_path):
    begun(tmp_path / "runs" / "mpjax-12")
    code, (call, queued) = shell((FILES / "train.sbatch").read_text(), code=143, **JOB)
    config = config_of(call)
    assert (code, queued) == (143, ["scontrol", "requeue", "12"])
    assert (config.resume, config.seed) == (True, 7)


def test_the_sbatch_file_asks_for_a_signal_before_the_time_limit():
    lines = [line for line in (FILES / "train.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --signal=TERM@120", "#SBATCH --requeue"} < set(lines)


def test_the_jobset_starts_as_many_processes_as_it_has_pods(shell, tmp_path):
    jobset = yaml.safe_load((FILES / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}:1234" == COORDINATOR
    assert job["parallelism"] == job["completions"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["values"]) == (container["name"], [2, 3])
    check_command(container["command"], job["completions"], shell, tmp_path)
    check_mounts(job["template"]["spec"])


def test_the_trainjob_starts_as_many_processes_as_it_has_nodes(shell, tmp_path):
    runtime, job = yaml.safe_load_all((FILES / "trainjob.yaml").read_text())
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']}:1234" == COORDINATOR
    check_command(job["spec"]["trainer"]["command"], job["spec"]["trainer"]["numNodes"], shell, tmp_path)
    check_mounts(replicated["template"]["spec"]["template"]["spec"])


def check_command(command, pods, shell, tmp_path):
    bash, flag, script = command
    assert (bash, flag) == ("bash", "-c")
    first, resumed = [], []
    for found in (first, resumed):
        for index in range(pods):
            _, (call,) = shell(script, JOB_COMPLETION_INDEX=str(index))
            found.append(config_of(call))
        if found is first:
            begun(tmp_path / "runs" / "mpjax")
    for configs in (first, resumed):
        places = [Distributed(coordinator=COORDINATOR, processes=pods, process=index) for index in range(pods)]
        assert [config.distributed for config in configs] == places
        assert {config.output_dir for config in configs} == {str(tmp_path / "runs" / "mpjax")}
    assert {(config.model.name, config.resume) for config in first} == {("resnet50", False)}
    assert {(config.seed, config.resume) for config in resumed} == {(7, True)}


def check_mounts(pod):
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def commands_of_the_readme():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if "--distributed.process " in line]
    return [shlex.split(line)[2:] for line in lines]


def test_the_commands_of_the_readme_are_those_of_two_processes_of_the_default_run():
    first, second = (load_config(words) for words in commands_of_the_readme())
    place = {"coordinator": "127.0.0.1:1234", "processes": 2}
    assert first == Config(output_dir="runs/two", distributed=Distributed(**place, process=0))
    assert second == Config(output_dir="runs/two", distributed=Distributed(**place, process=1))


@pytest.mark.slow
def test_the_commands_of_the_readme_train_the_default_run_together(tmp_path):
    """For a few steps, and at a port that is free here."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    short = shlex.split("--steps 4 --optimizer.warmup 1 --loop.log_every 1 --report.no_tensorboard --report.no_plot")
    train = [sys.executable, str(ROOT / "scripts" / "train.py")]
    commands = [[word.replace("1234", port) for word in words] for words in commands_of_the_readme()]
    started = [subprocess.Popen([*train, *words, *short], cwd=tmp_path) for words in commands]
    assert [process.wait(300) for process in started] == [0, 0]
    assert json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())["steps"] == 4
