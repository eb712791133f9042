"""The settings files that come with mpjax, which `--config NAME` finds from any folder."""

import pathlib

from mpjax.config.paths import expanded


_PREFIX = "configs/"
_PACKAGE = pathlib.Path(__file__).parents[1]
# A wheel has the folder in the package, a checkout beside it.
FOLDER = next((place for place in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if place.is_dir()), _PACKAGE)


def names() -> list[str]:
    """Returns what `--config` finds anywhere: `digits`, `precision/float16` and so on."""
    files = FOLDER.rglob("*.toml") if FOLDER != _PACKAGE else ()
    return sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in files)


def settings_file(text: str) -> pathlib.Path:
    """Returns the file that a text names: that of this path, else the shipped one of this name.

    `digits`, `digits.toml` and `configs/digits.toml` are the same shipped file; `configs/pets.py` is beside it.
    """
    path = expanded(text)
    if path.is_absolute() or (path.exists() and not path.is_dir()) or ".." in path.parts:
        return path
    inside = pathlib.PurePath(text.removeprefix(_PREFIX))
    found = (FOLDER / inside, FOLDER / f"{inside}.toml")
    return next((file for file in found if file.is_file()), path)
