"""What `mpjax.models.decoder` offers."""

from mpjax.models.decoder.config_json import read_settings as read_settings
from mpjax.models.decoder.config_json import settings_of as settings_of
from mpjax.models.decoder.experts import Experts as Experts
from mpjax.models.decoder.experts import Router as Router
from mpjax.models.decoder.experts import tiles_of as tiles_of
from mpjax.models.decoder.folder import export_decoder as export_decoder
from mpjax.models.decoder.folder import load_decoder as load_decoder
from mpjax.models.decoder.network import Decoder as Decoder
from mpjax.models.decoder.network import RMSNorm as RMSNorm
from mpjax.models.decoder.settings import DecoderSettings as DecoderSettings
from mpjax.models.decoder.settings import ExpertSettings as ExpertSettings
from mpjax.models.decoder.weights import huggingface as huggingface
