"""What `mpjax.data.audio` offers."""

from mpjax.data.audio.feature_settings import FeatureSettings as FeatureSettings
from mpjax.data.audio.feature_settings import read_features as read_features
from mpjax.data.audio.mel_features import log_mels as log_mels
from mpjax.data.audio.sounds import Sound as Sound
from mpjax.data.audio.speech_tokens import prompt_of as prompt_of
from mpjax.data.audio.speech_tokens import suppressed_in as suppressed_in
from mpjax.data.audio.waveforms import read_waveform as read_waveform
