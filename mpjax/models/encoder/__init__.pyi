"""What `mpjax.models.encoder` offers."""

from mpjax.models.encoder.config_json import read_settings as read_settings
from mpjax.models.encoder.config_json import settings_of as settings_of
from mpjax.models.encoder.folder import export_encoder as export_encoder
from mpjax.models.encoder.folder import load_encoder as load_encoder
from mpjax.models.encoder.kinds import make_classifier as make_classifier
from mpjax.models.encoder.kinds import make_encoder as make_encoder
from mpjax.models.encoder.modernbert import ModernBERT as ModernBERT
from mpjax.models.encoder.modernbert_settings import ModernBERTSettings as ModernBERTSettings
from mpjax.models.encoder.network import Encoder as Encoder
from mpjax.models.encoder.sentence import normalized as normalized
from mpjax.models.encoder.sentence import pooled as pooled
from mpjax.models.encoder.settings import EncoderSettings as EncoderSettings
from mpjax.models.encoder.settings import Sentence as Sentence
