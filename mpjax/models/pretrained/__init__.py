"""Loads pretrained weights from safetensors files into a model and exports them, in the right precision."""

from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.load import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport, Row


__all__ = ["PretrainedReport", "Row", "export_safetensors", "load_pretrained"]
