"""What `mpjax.models.vision` offers."""

from mpjax.models.vision.config_json import settings_of as settings_of
from mpjax.models.vision.folder import export_vision as export_vision
from mpjax.models.vision.folder import load_vision as load_vision
from mpjax.models.vision.images import require_statistics as require_statistics
from mpjax.models.vision.kinds import make_network as make_network
from mpjax.models.vision.positions import interpolated as interpolated
