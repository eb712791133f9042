"""What `mpjax.models.pretrained` offers."""

from mpjax.models.pretrained.export import export_safetensors as export_safetensors
from mpjax.models.pretrained.files import DTYPES as DTYPES
from mpjax.models.pretrained.files import Tensor as Tensor
from mpjax.models.pretrained.files import download as download
from mpjax.models.pretrained.files import find_files as find_files
from mpjax.models.pretrained.files import open_tensors as open_tensors
from mpjax.models.pretrained.files import variables_of as variables_of
from mpjax.models.pretrained.load import cast as cast
from mpjax.models.pretrained.load import load_pretrained as load_pretrained
from mpjax.models.pretrained.load import losses as losses
from mpjax.models.pretrained.match import foreign_shape as foreign_shape
from mpjax.models.pretrained.match import match_arrays as match_arrays
from mpjax.models.pretrained.peft import export_adapter as export_adapter
from mpjax.models.pretrained.report import PretrainedReport as PretrainedReport
from mpjax.models.pretrained.report import WeightRow as WeightRow
