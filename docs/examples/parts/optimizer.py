"""Your own optimizer and schedule in the trainer:

python scripts/train.py --model.name mlp --optimizer.name docs/examples/parts/optimizer.py:centred \
    --optimizer.arguments momentum 0.95 --optimizer.schedule docs/examples/parts/optimizer.py:flat_then_down
"""

import dataclasses
import tempfile

import optax

import mpjax


def centred(learning_rate, weight_decay, mask, momentum=0.9):
    """Momentum of gradients without their mean (Yong et al., "Gradient Centralization", 2020, arXiv:2004.01461)."""
    decay = optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(optax.centralize(), decay, optax.trace(momentum), optax.scale_by_learning_rate(learning_rate))


def flat_then_down(peak, steps):
    """Stays at the peak, and falls to 0 over the last fifth; it takes no `warmup`, so mpjax warms up before it."""
    return optax.linear_schedule(peak, 0.0, max(1, steps // 5), transition_begin=steps - steps // 5)


def main(steps: int = 300) -> dict:
    """Trains an MLP on digits under mixed_float16 and returns the summary of the run."""
    own = {"name": f"{__file__}:centred", "arguments": {"momentum": "0.95"}, "schedule": f"{__file__}:flat_then_down"}
    optimizer = mpjax.config.schema.Optimizer(learning_rate=0.1, **own)
    with tempfile.TemporaryDirectory() as root:
        config = mpjax.Config(steps=mpjax.Duration(steps), output_dir=f"{root}/run", optimizer=optimizer)
        return mpjax.run(dataclasses.replace(config, model=dataclasses.replace(config.model, name="mlp")))


if __name__ == "__main__":
    main()
