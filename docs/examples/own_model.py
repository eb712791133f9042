"""Your own model in the trainer: `--model.name docs/examples/own_model.py:Net`, with float16 parameters.

- `Net` takes the fields of a batch and `rngs`, and sets no dtypes: a policy sets them.
- `mpjax.audit` lists the dtype of every operation, forward and backward, without computing anything. Under policy
  `float16`, which stores parameters in float16 too, it names `Gate`: its gradient is a sum over all pixels of a batch,
  and accumulates in float16.
- A rule keeps the parameters of `Gate`, and therefore this sum, in float32. The rest stays in float16, with float32
  master weights in the optimizer.

The same from the command line:

    python scripts/train.py --model.name docs/examples/own_model.py:Net --precision.policy float16 \\
        --precision.rules type:Gate float32
"""

import dataclasses
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from mpjax.data import Image, Label
from mpjax.precision import Audit, PolicyReport


RULES = {"type:Gate": "float32"}


class Gate(nnx.Module):
    """A factor per channel for the output of a block, small at first (layer scale, arXiv:2103.17239)."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.full((width,), 0.1))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scales [..., width]."""
        # Broadcast in the parameter dtype, so that the gradient accumulates in it; then cast, so that the result is not
        # promoted to float32.
        return x * jnp.broadcast_to(self.scale[...], x.shape).astype(x.dtype)


class Block(nnx.Module):
    """A grouped convolution for local features and attention for distant ones."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.near = nnx.Conv(width, width, (3, 3), feature_group_count=4, rngs=rngs)
        self.norm1 = nnx.GroupNorm(width, num_groups=4, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.far = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.gate = Gate(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the block to features [B, H, W, width]."""
        x = x + nnx.relu(self.norm1(self.near(x)))
        pixels = self.norm2(x).reshape(x.shape[0], -1, x.shape[-1])  # [B, H W, width]
        return x + self.gate(self.far(pixels)).reshape(x.shape)


class Net(nnx.Module):
    """The network.

    Args:
      fields: the fields of a batch; `fields["image"].shape` and `fields["label"].num_classes` set the sizes.
      rngs: the random numbers of the initial values.
    """

    def __init__(self, fields, *, rngs: nnx.Rngs):
        width = 32
        self.stem = nnx.Conv(fields["image"].shape[2], width, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, fields["label"].num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, num_classes]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def settings(steps: int, output_dir: str) -> mpjax.Config:
    """Returns the settings to train this model on the default data set."""
    base = mpjax.Config(steps=mpjax.Duration(steps), output_dir=output_dir)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, name=f"{__file__}:Net"),
        precision=dataclasses.replace(base.precision, policy="float16", rules=RULES),
        optimizer=dataclasses.replace(base.optimizer, name="adamw", learning_rate=1e-2),
    )


def audit(rules: dict[str, str]) -> tuple[PolicyReport, Audit]:
    """Returns the report of policy `float16` with `rules` on the model, and the audit of its gradient."""
    policy = dataclasses.replace(mpjax.get_policy("float16"), rules=rules)
    model = Net({"image": Image((8, 8, 1)), "label": Label(10)}, rngs=nnx.Rngs(0))
    given = mpjax.apply_policy(model, policy)

    def gradient(model, images):
        return nnx.grad(lambda model: jnp.mean(model(images)))(model)

    images = jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float16)
    return given, mpjax.audit(gradient, model, images, policy=policy)


class Told(NamedTuple):
    """The results.

    Attributes:
      before: the audit without rules.
      given: the report of `mpjax.apply_policy`, with the rule.
      after: the audit with the rule.
      summary: the summary of the run, from `mpjax.run`.
    """

    before: Audit
    given: PolicyReport
    after: Audit
    summary: dict


def main(steps: int = 150) -> Told:
    """Audits without and with the rule, then trains."""
    _, before = audit({})
    print("without the rule, sums in float16:", *suspects(before), sep="\n  ")
    given, after = audit(RULES)
    print("\nwith the rule:", *suspects(after), sep="\n  ")
    print(given, after, sep="\n\n", end="\n\n")
    with tempfile.TemporaryDirectory() as root:
        summary = mpjax.run(settings(steps, f"{root}/run"))
    return Told(before, given, after, summary)


def suspects(found: Audit) -> list[str]:
    """Lists the operations by module that should be in float32 and are not."""
    return [f"{row.path}: {row.count} {row.operation} in {row.dtype}" for row in found.narrow] or ["none"]


if __name__ == "__main__":
    main()
