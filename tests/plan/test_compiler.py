"""XLA's compiler for CUDA: where it is looked for, how it is installed, and that other programs do not notice it."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from mpjax.errors import UsageError
from mpjax.plan import compiler, compiler_folder, install_compiler, mesh_of, require_compiler, without_noise


OWN = importlib.metadata.version("jaxlib")


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """Neither JAX's packages for a GPU nor a compiler of mpjax's own."""
    monkeypatch.setattr(compiler, "_version", lambda package: None)
    monkeypatch.setenv("MPJAX_CACHE", str(tmp_path))
    return tmp_path


def test_each_version_of_jaxlib_has_a_compiler_of_its_own(nothing):
    assert compiler_folder() == nothing / "cuda_compiler" / OWN


def test_without_a_compiler_the_message_says_how_to_get_one(nothing):
    with pytest.raises(UsageError, match=f"of jaxlib {OWN}; write: python scripts/plan.py --install, which"):
        require_compiler()


def test_an_installed_compiler_will_do(nothing):
    library = compiler_folder() / "jax_plugins" / "xla_cuda12" / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    require_compiler()


def test_packages_of_another_version_are_named_with_the_line_to_write(nothing, monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda package: "0.1.2")
    with pytest.raises(UsageError) as raised:
        require_compiler()
    message = str(raised.value)
    assert f"version {OWN}; jax-cuda12-plugin 0.1.2, jax-cuda12-pjrt 0.1.2; write" in message
    assert f"pip install --no-deps jax-cuda12-plugin=={OWN} jax-cuda12-pjrt=={OWN}" in message
    assert "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt, then python scripts/plan.py --install" in message


def test_the_packages_for_cuda_13_will_do(nothing, monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda package: OWN if "cuda13" in package else "0.1.2")
    require_compiler()


def test_half_of_a_pair_is_named(nothing, monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda package: OWN if package == "jax-cuda13-plugin" else None)
    with pytest.raises(UsageError, match=f"{OWN}; jax-cuda13-pjrt is not installed; write"):
        require_compiler()


def installer(code: int, *, writes: bool):
    def run(command, **options):
        assert command[1:3] == ["-m", "pip"]
        assert command[-1] == f"jax-cuda12-pjrt=={OWN}"
        if writes:
            library = pathlib.Path(command[-2], "jax_plugins/xla_cuda12/xla_cuda_plugin.so")
            library.parent.mkdir(parents=True)
            library.touch()
        return subprocess.CompletedProcess(command, code)

    return run


def test_a_compiler_is_installed_once(nothing, monkeypatch):
    monkeypatch.setattr(subprocess, "run", installer(0, writes=True))
    assert install_compiler() == nothing / "cuda_compiler" / OWN
    require_compiler()
    monkeypatch.setattr(subprocess, "run", installer(1, writes=False))
    install_compiler()


@pytest.mark.parametrize("code", [0, 1])
def test_an_installation_that_fails_leaves_nothing(nothing, monkeypatch, code):
    monkeypatch.setattr(subprocess, "run", installer(code, writes=False))
    with pytest.raises(UsageError, match="cannot install jax-cuda12-pjrt==.*uv pip install --no-deps --target"):
        install_compiler()
    assert list((nothing / "cuda_compiler").iterdir()) == []


def test_a_folder_without_the_compiler_is_no_compiler(nothing, monkeypatch):
    """An installation by hand that was interrupted is not taken for another plan that was faster."""
    folder = nothing / "cuda_compiler" / OWN
    folder.mkdir(parents=True)
    (folder / "part").touch()
    monkeypatch.setattr(subprocess, "run", installer(0, writes=True))
    with pytest.raises(UsageError, match=f"cannot be moved to {folder}: Directory not empty; remove that folder"):
        install_compiler()


def test_the_first_plan_downloads_the_compiler(nothing, monkeypatch, capsys):
    """Without a network: up to the call of pip."""
    monkeypatch.setattr(compiler, "load_compiler", compiler.load_compiler.__wrapped__)
    monkeypatch.setattr(subprocess, "run", installer(1, writes=False))
    with pytest.raises(UsageError, match="cannot install jax-cuda12-pjrt=="):
        mesh_of("h200", 7)
    assert capsys.readouterr().err == f"downloading XLA's compiler for CUDA (175 MB) to {compiler_folder()}\n"


def test_only_lines_about_the_missing_driver_are_left_out(capfd):
    with without_noise():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(
            2, b"I0000 7860 cudart_stub.cc:31] Could not find cuda drivers on your machine\nE0000 not enough memory\n"
        )
        print("a warning", file=sys.stderr)
    assert sorted(capfd.readouterr().err.splitlines()) == ["E0000 not enough memory", "a warning"]


DEVICES = "import importlib.metadata as m, jax; jax.devices(); print(len(m.entry_points(group='jax_plugins')))"


def test_other_programs_do_not_notice_the_compiler(plugin):
    """In a process like a user's: no platform is chosen and nothing is silenced."""
    if compiler._version("jax-cuda12-pjrt"):
        pytest.skip("pip uninstall jax-cuda12-pjrt jax-cuda12-plugin; mpjax plan --install")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_plan_prints_nothing_about_a_missing_driver(plugin):
    code = "from mpjax.plan.target import mesh_of; print(mesh_of('h200', 2).devices.size)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2\n", "")
