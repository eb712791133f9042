"""The stand-in for NVIDIA's assembler, called as XLA calls it."""

import pathlib
import subprocess

from mpjax.plan import toolkit_folder


def assembler() -> str:
    return str(pathlib.Path(toolkit_folder()) / "bin" / "ptxas")


def test_it_says_a_version_that_knows_every_gpu():
    said = subprocess.check_output([assembler(), "--version"], text=True)
    assert "release 12.9, V12.9.86" in said


def test_it_leaves_a_file_where_the_machine_code_is_to_be(tmp_path):
    wanted = tmp_path / "kernel.cubin"
    subprocess.check_call([assembler(), str(tmp_path / "kernel.ptx"), "-o", str(wanted), "-arch=sm_90a", "-v"])
    assert wanted.stat().st_size > 0


def test_there_is_one_folder_for_the_life_of_a_process():
    assert toolkit_folder() == toolkit_folder()
