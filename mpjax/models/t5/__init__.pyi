"""What `mpjax.models.t5` offers."""

from mpjax.models.t5.config_json import read_settings as read_settings
from mpjax.models.t5.config_json import settings_of as settings_of
from mpjax.models.t5.folder import export_t5 as export_t5
from mpjax.models.t5.folder import load_t5 as load_t5
from mpjax.models.t5.generation import split_t5 as split_t5
from mpjax.models.t5.network import T5 as T5
from mpjax.models.t5.positions import bucket_of as bucket_of
from mpjax.models.t5.settings import T5Settings as T5Settings
