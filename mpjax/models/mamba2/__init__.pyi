"""What `mpjax.models.mamba2` offers."""

from mpjax.models.mamba2.config_json import read_settings as read_settings
from mpjax.models.mamba2.config_json import settings_of as settings_of
from mpjax.models.mamba2.folder import export_mamba2 as export_mamba2
from mpjax.models.mamba2.folder import load_mamba2 as load_mamba2
from mpjax.models.mamba2.network import Mamba2 as Mamba2
from mpjax.models.mamba2.scan import state_space as state_space
from mpjax.models.mamba2.settings import Mamba2Settings as Mamba2Settings
