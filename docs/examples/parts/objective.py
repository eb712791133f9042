"""Distillation: a teacher and a student in one module, trained in one step; the student learns the teacher's answers.

python scripts/train.py --model.name docs/examples/parts/objective.py:Pair \\
    --training.objective docs/examples/parts/objective.py:distillation
"""

import jax
import optax
from flax import nnx


class Pair(nnx.Module):
    """A network and a smaller one."""

    def __init__(self, fields, *, rngs: nnx.Rngs):
        height, width, channels = fields["image"].shape
        inputs, classes = height * width * channels, fields["label"].num_classes

        def layers(units: int) -> nnx.Sequential:
            first, last = nnx.Linear(inputs, units, rngs=rngs), nnx.Linear(units, classes, rngs=rngs)
            return nnx.Sequential(first, nnx.relu, last)

        self.teacher, self.student = layers(64), layers(8)


def distillation(model, batch):
    """Returns the loss of both networks and their accuracy, for each example."""
    images = batch["image"].reshape(len(batch["image"]), -1)
    teacher, student = model.teacher(images), model.student(images)
    answers = jax.lax.stop_gradient(jax.nn.softmax(teacher / 2))
    own = optax.softmax_cross_entropy_with_integer_labels(teacher, batch["label"])
    return {
        "loss": own + optax.softmax_cross_entropy(student / 2, answers),
        "teacher": teacher.argmax(-1) == batch["label"],
        "student": student.argmax(-1) == batch["label"],
        "outputs": student,  # for --training.metrics
    }
