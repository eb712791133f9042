"""What autocast costs while a function is traced: a ResNet-50 through it, beside the same model as it is.

Runs are interleaved, each with caches of JAX emptied; the ratio of medians is given, and the quartiles of the ratios of
neighbouring runs. At run time there is nothing to measure: the compiled programs are those of hand-placed casts.

    python benchmarks/autocast_tracing.py --output benchmarks/results/autocast_tracing_cpu.json
"""

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax
from mpjax.models import ImageNetStem, resnet50


IMAGES = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)


def model() -> tuple[Callable, tuple]:
    """ResNet-50 at its full size as a function of its parameters, and their shapes; nothing is computed."""
    make = functools.partial(resnet50, ImageNetStem, channels=3, width=64, num_classes=1000)
    graph, params, stats = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param, ...)

    def forward(params, stats, images):
        net = nnx.merge(graph, params, stats, copy=True)
        return net(images), nnx.state(net, nnx.Not(nnx.Param))

    return forward, (params, stats)


def with_gradient(forward: Callable) -> Callable:
    def step(params, stats, images):
        def loss(params):
            logits, new = forward(params, stats, images)
            return jnp.square(logits.astype(jnp.float32)).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    return step


def trace(fn: Callable, args: tuple) -> None:
    jax.jit(fn).trace(*args)


def lower(fn: Callable, args: tuple) -> None:
    jax.jit(fn).lower(*args)


def seconds(how: Callable, fn: Callable, args: tuple) -> float:
    """Of tracing a function that JAX has not seen, as at the start of a run."""
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    how(fn, args)
    return time.perf_counter() - start


def compare(how: Callable, plain: Callable, cast: Callable, args: tuple, repeats: int) -> dict:
    for fn in (plain, cast):
        seconds(how, fn, args)
    pairs = [(seconds(how, cast, args), seconds(how, plain, args)) for _ in range(repeats)]
    with_autocast, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio_of_medians": with_autocast / without,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "autocast_seconds": with_autocast,
        "plain_seconds": without,
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    forward, (params, stats) = model()
    cast = mpjax.autocast(forward, "mixed_bfloat16")
    functions = {
        "forward": (forward, cast),
        "forward and backward": (with_gradient(forward), with_gradient(cast)),
    }
    results = {
        f"resnet50 {name}, {how.__name__}": compare(how, plain, through, (params, stats, IMAGES), arguments.repeats)
        for name, (plain, through) in functions.items()
        for how in (trace, lower)
    }
    for name, result in results.items():
        low, high = result["ratio_quartiles"]
        print(
            f"{name}: {result['autocast_seconds']:.2f} s, {result['ratio_of_medians']:.2f} times that without "
            f"(quartiles {low:.2f} to {high:.2f})"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
