"""What `mpjax.models.image_text` offers."""

from mpjax.models.image_text.config_json import settings_of as settings_of
from mpjax.models.image_text.folder import export_image_text as export_image_text
from mpjax.models.image_text.folder import load_image_text as load_image_text
from mpjax.models.image_text.network import ImageText as ImageText
