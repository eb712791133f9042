"""Loads pretrained weights from safetensors files into a model and exports them, in the right precision."""

from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.load import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport, WeightRow


__all__ = ["PretrainedReport", "WeightRow", "export_safetensors", "load_pretrained"]
