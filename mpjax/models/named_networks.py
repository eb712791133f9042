"""The networks that have a name: each file is imported when a network in it is built, so that a run imports one."""

from collections.abc import Callable
from types import ModuleType

from flax import nnx


def network(family: str, name: str) -> Callable[..., nnx.Module]:
    """Returns a function that builds a network, by its name in the file of its family, from keyword arguments."""

    def make(**arguments) -> nnx.Module:
        return getattr(_file_of(family), name)(**arguments)

    return make


def _file_of(family: str) -> ModuleType:
    # Statements, not import_module: no text decides which code is loaded.
    match family:
        case "bert":
            from mpjax.models import bert as file
        case "convnext":
            from mpjax.models import convnext as file
        case "densenet":
            from mpjax.models import densenet as file
        case "diffusion_unet":
            from mpjax.models.diffusion import unet as file
        case "dit":
            from mpjax.models.diffusion import dit as file
        case "efficientnet":
            from mpjax.models import efficientnet as file
        case "gpt2":
            from mpjax.models import gpt2 as file
        case "mlp":
            from mpjax.models import mlp as file
        case "mobilenetv3":
            from mpjax.models import mobilenetv3 as file
        case "regnet":
            from mpjax.models import regnet as file
        case "resnet":
            from mpjax.models import resnet as file
        case "unet":
            from mpjax.models import unet as file
        case "vit":
            from mpjax.models import vit as file
        case "wide_resnet":
            from mpjax.models import wide_resnet as file
        case "xception":
            from mpjax.models import xception as file
        case _:
            raise KeyError(family)
    return file
