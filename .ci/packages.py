"""Checks what is published: the sdist, the wheel that is built from it, and the wheel of the checkout.

python .ci/packages.py SDIST WHEEL_OF_SDIST WHEEL_OF_CHECKOUT
"""

import pathlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping


NEEDED = ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")
LARGEST_MB = {"sdist": 5, "wheel": 2}


def of_sdist(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of an sdist by their path below its folder."""
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def of_wheel(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a wheel by path."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def faults(
    sdist: Mapping[str, bytes], built: Mapping[str, bytes], direct: Mapping[str, bytes], tracked: Collection[str]
) -> Iterator[str]:
    """Yields what is wrong with the files of an sdist, of the wheel built from it and of the checkout's own wheel."""
    beside = {name for name in tracked if name.startswith(("tests/", "examples/"))}
    configs = {name for name in tracked if name.startswith("configs/")}
    package = {name for name in tracked if name.startswith("mpjax/")}
    for name in sorted({*NEEDED, *beside, *package, *configs} - sdist.keys()):
        yield f"the sdist lacks {name}"
    for name in sorted(sdist.keys() - {*tracked, "PKG-INFO"}):
        yield f"the sdist has {name}, which git does not track"
    package |= {f"mpjax/{name}" for name in configs}
    inside = {name for name in built if ".dist-info/" not in name}
    for name in sorted(package - inside):
        yield f"the wheel lacks {name}"
    for name in sorted(inside - package):
        yield f"the wheel has {name}, which is no file of the package"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in built):
        yield "the wheel lacks the LICENSE"
    for name in sorted(built.keys() | direct.keys()):
        if built.get(name) != direct.get(name):
            yield f"{name} is not the same in the wheel of the sdist and in that of the checkout"


def main() -> int:
    """Prints the faults of the three files that the command line names; returns 1 if there are any."""
    sdist, built, direct = map(pathlib.Path, sys.argv[1:])
    tracked = subprocess.check_output(["git", "ls-files"], text=True).splitlines()
    found = list(faults(of_sdist(sdist), of_wheel(built), of_wheel(direct), tracked))
    for kind, path in (("sdist", sdist), ("wheel", built)):
        size = path.stat().st_size / 1e6
        print(f"{path.name}: {size:.1f} MB")
        if size > LARGEST_MB[kind]:
            found.append(f"{path.name} is larger than {LARGEST_MB[kind]} MB")
    print("\n".join(found) or f"wheel and sdist have what they must, and the same {len(of_wheel(built))} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
