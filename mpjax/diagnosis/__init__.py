"""Diagnoses whether precision causes a NaN or a loss of accuracy, in which module, and what to change."""

from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.one_step import diagnose, diagnose_function


__all__ = ["Diagnosis", "diagnose", "diagnose_function"]
