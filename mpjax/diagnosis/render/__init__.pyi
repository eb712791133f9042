"""What `mpjax.diagnosis.render` offers."""

from mpjax.diagnosis.render.curves import errors as errors
from mpjax.diagnosis.render.curves import name_of as name_of
from mpjax.diagnosis.render.curves import scales_of as scales_of
from mpjax.diagnosis.render.page import cell_of as cell_of
from mpjax.diagnosis.render.page import range_strips as range_strips
from mpjax.diagnosis.render.text import COLUMNS as COLUMNS
from mpjax.diagnosis.render.text import error_text as error_text
from mpjax.diagnosis.render.text import percent as percent
from mpjax.diagnosis.render.text import rich_of as rich_of
from mpjax.diagnosis.render.text import row_texts as row_texts
from mpjax.diagnosis.render.text import text_of as text_of
