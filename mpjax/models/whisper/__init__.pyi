"""What `mpjax.models.whisper` offers."""

from mpjax.models.whisper.config_json import read_settings as read_settings
from mpjax.models.whisper.config_json import settings_of as settings_of
from mpjax.models.whisper.folder import export_whisper as export_whisper
from mpjax.models.whisper.folder import load_whisper as load_whisper
from mpjax.models.whisper.generation import split_whisper as split_whisper
from mpjax.models.whisper.network import Whisper as Whisper
from mpjax.models.whisper.network import WhisperClassifier as WhisperClassifier
from mpjax.models.whisper.settings import WhisperSettings as WhisperSettings
