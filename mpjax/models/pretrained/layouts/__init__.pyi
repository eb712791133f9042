"""What `mpjax.models.pretrained.layouts` offers."""

from mpjax.models.pretrained.layouts.bert import huggingface_bert as huggingface_bert
from mpjax.models.pretrained.layouts.entry import CONV as CONV
from mpjax.models.pretrained.layouts.entry import LINEAR as LINEAR
from mpjax.models.pretrained.layouts.entry import SAME as SAME
from mpjax.models.pretrained.layouts.entry import FileEntry as FileEntry
from mpjax.models.pretrained.layouts.entry import FusedPart as FusedPart
from mpjax.models.pretrained.layouts.entry import layer_entries as layer_entries
from mpjax.models.pretrained.layouts.entry import reshaped as reshaped
from mpjax.models.pretrained.layouts.families import layouts_of as layouts_of
from mpjax.models.pretrained.layouts.gpt2 import huggingface_gpt2 as huggingface_gpt2
from mpjax.models.pretrained.layouts.vit import huggingface_vit as huggingface_vit
from mpjax.models.pretrained.layouts.vit import state_dict as state_dict
