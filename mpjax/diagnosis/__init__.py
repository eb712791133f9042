"""Whether precision is to blame for a NaN or a lost accuracy, which module, and what to change."""

from mpjax.diagnosis.diagnose import diagnose, diagnose_function
from mpjax.diagnosis.diagnosis import Diagnosis


__all__ = ["Diagnosis", "diagnose", "diagnose_function"]
