"""Networks in Flax NNX, plain enough to read as a tutorial: settings in, module out."""

import math

from flax import nnx

from mpjax.config import schema
from mpjax.models import resnet
from mpjax.models.mlp import MLP
from mpjax.precision.scopes import name_scopes


def build(config: schema.Model, *, image_shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
    """The network that `config` names, in float32, its operations named by module path.

    Args:
      config: the `model` section.
      image_shape: height, width and channels of one image.
      num_classes: number of logits.
      rngs: where initial values come from.
    """
    if config.name == "mlp":
        model = MLP(math.prod(image_shape), config.width, config.depth, num_classes, rngs=rngs)
    else:
        stem = resnet.SmallStem if config.stem == "small" else resnet.ImageNetStem
        make = getattr(resnet, config.name)
        model = make(stem, channels=image_shape[-1], width=config.width, num_classes=num_classes, rngs=rngs)
    name_scopes(model)
    return model
