"""An objective of one's own: a teacher trains with its student, which also learns the teacher's soft answers.

    mpjax-free part: two networks in one module, two losses in one step.

python scripts/train.py --model.name docs/examples/own_objective.py:Pair \\
    --training.objective docs/examples/own_objective.py:distillation --training.metrics docs/examples/own_objective.py:top2
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Pair(nnx.Module):
    """A teacher and a smaller student."""

    def __init__(self, fields, *, rngs: nnx.Rngs):
        height, width, channels = fields["image"].shape
        inputs, classes = height * width * channels, fields["label"].num_classes
        layers = {name: (inputs, units, classes) for name, units in (("teacher", 64), ("student", 8))}
        for name, (first, second, last) in layers.items():
            body = nnx.Sequential(nnx.Linear(first, second, rngs=rngs), nnx.relu, nnx.Linear(second, last, rngs=rngs))
            setattr(self, name, body)


def distillation(model, batch, key):
    """Returns the losses of both, and how often each is right, for each example."""
    images = batch["image"].reshape(len(batch["image"]), -1)
    teacher, student = model.teacher(images), model.student(images)
    answers = jax.lax.stop_gradient(jax.nn.softmax(teacher / 2))
    loss = optax.softmax_cross_entropy_with_integer_labels(teacher, batch["label"])
    loss += optax.softmax_cross_entropy(student / 2, answers)
    right = {
        f"{name}_accuracy": logits.argmax(-1) == batch["label"]
        for name, logits in (("teacher", teacher), ("student", student))
    }
    return {"loss": loss, **right, "outputs": student}


def top2(outputs, batch):
    """Returns whether the label is among the two largest logits of the student."""
    return jnp.any(jax.lax.top_k(outputs, 2)[1] == batch["label"][:, None], axis=-1)
