"""Reads a user's sounds as inputs to a trained model."""

from collections.abc import Sequence

from mpjax.config.schema import Data
from mpjax.data.audio.feature_settings import read_features
from mpjax.data.audio.mel_features import log_mels
from mpjax.data.audio.sound_files import SOUND
from mpjax.data.audio.waveforms import read_waveform, require_packages
from mpjax.data.given import Inputs, files_of
from mpjax.data.stacking import Arrays


def given_sounds(inputs: Sequence[str], config: Data) -> Inputs:
    """Builds `Inputs` of wav and flac files, read as the sounds of the set `config`.

    Args:
      inputs: paths of files, folders and globs; see `files_of`.
      config: `features`.

    Raises:
      UsageError: a file does not exist, a folder has no files, a glob matches none, or a package is missing. When a
        sound is read: as `read_waveform`.
    """
    require_packages()
    settings = read_features(config.features)
    paths = [path for pattern in inputs for path in files_of(pattern)]

    def to_arrays(path: str) -> Arrays:
        return {SOUND: log_mels(read_waveform(path, settings), settings)[None]}

    return Inputs(paths, lambda positions: [paths[position] for position in positions], to_arrays)
