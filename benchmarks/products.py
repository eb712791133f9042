"""The convolutions and matrix products of a step alone, by XLA and by PyTorch, in turns: no step on a CPU takes less.

Of the two models that `benchmarks/peers.py` trains. Each product is run forwards, for the gradient of its input and for
that of its kernel; times are those of a whole step's.

    pip install -e '.[bench]'
    python benchmarks/products.py --output benchmarks/results/products_cpu.json
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe
from peers import tasks


WAYS = ("forward", "input gradient", "kernel gradient")
DTYPES = ("float32", "bfloat16")


class Product(NamedTuple):
    """Features [B, side, side, channels] by a kernel; `window` 1 of side 1 is a matrix product."""

    batch: int
    side: int
    window: int
    stride: int
    channels: int
    out: int

    @property
    def operations(self) -> int:
        return 2 * self.batch * (self.side // self.stride) ** 2 * self.window**2 * self.channels * self.out


def products_of(task: tasks.TaskName) -> Iterator[Product]:
    """Those of one forward pass; of the Transformer all but the attention's own and the first."""
    if task == "vit":
        rows, width = tasks.BATCH * (tasks.SIDE // tasks.PATCH) ** 2, tasks.WIDTH
        for _ in range(tasks.DEPTH):
            yield from [Product(rows, 1, 1, 1, width, width)] * 4
            yield Product(rows, 1, 1, 1, width, 4 * width)
            yield Product(rows, 1, 1, 1, 4 * width, width)
        return
    side = tasks.SIDE
    yield Product(tasks.BATCH, side, 3, 1, tasks.CHANNELS, tasks.RESNET_WIDTH)
    for _, channels, out, stride in tasks.blocks_of_resnet():
        yield Product(tasks.BATCH, side, 3, stride, channels, out)
        if channels != out:
            yield Product(tasks.BATCH, side, 1, stride, channels, out)
        side //= stride
        yield Product(tasks.BATCH, side, 3, 1, out, out)


def by_xla(product: Product, dtype: str) -> list[Callable[[], object]]:
    """What runs it, for each of `WAYS`."""

    def forward(x, kernel):
        if product.side == 1:
            return x @ kernel
        half = product.window // 2
        strides, pads = (product.stride, product.stride), [(half, half), (half, half)]
        return jax.lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    n, side, window, _, channels, out = product
    shape, kernel_shape = (n, side, side, channels), (window, window, channels, out)
    if side == 1:
        shape, kernel_shape = (n, channels), (channels, out)
    x, kernel = (jax.random.normal(jax.random.key(0), of, dtype) for of in (shape, kernel_shape))
    y = jnp.ones_like(forward(x, kernel))
    ways = (
        (jax.jit(forward), (x, kernel)),
        (jax.jit(lambda kernel, y: jax.linear_transpose(lambda x: forward(x, kernel), x)(y)), (kernel, y)),
        (jax.jit(lambda x, y: jax.linear_transpose(lambda kernel: forward(x, kernel), kernel)(y)), (x, y)),
    )
    return [functools.partial(_finished, way, arguments) for way, arguments in ways]


def _finished(way: Callable, arguments: tuple) -> None:
    jax.block_until_ready(way(*arguments))


def by_torch(product: Product, dtype: str) -> list[Callable[[], object]]:
    """What runs it, for each of `WAYS`, channels last."""
    n, side, window, stride, channels, out = product
    if side == 1:
        x, kernel = (torch.randn(of, dtype=getattr(torch, dtype)) for of in ((n, channels), (channels, out)))
        y = torch.ones_like(x @ kernel)
        return [lambda: x @ kernel, lambda: y @ kernel.T, lambda: x.T @ y]
    shapes = (n, channels, side, side), (out, channels, window, window)
    x, kernel = (torch.randn(of, dtype=getattr(torch, dtype)).to(memory_format=torch.channels_last) for of in shapes)
    strides, pads = (stride, stride), (window // 2, window // 2)
    y = torch.ones_like(torch.conv2d(x, kernel, None, strides, pads))

    def backward(*wanted: bool):
        return torch.ops.aten.convolution_backward(
            y, x, kernel, None, strides, pads, (1, 1), False, (0, 0), 1, (*wanted, False)
        )

    return [
        lambda: torch.conv2d(x, kernel, None, strides, pads),
        lambda: backward(True, False),
        lambda: backward(False, True),
    ]


def measure(task: tasks.TaskName, dtype: str, repeats: int) -> dict:
    """By library and way, milliseconds of all products together and their GFLOP/s."""
    makers = {"XLA": by_xla, "PyTorch": by_torch}
    spent = {name: dict.fromkeys(WAYS, 0.0) for name in makers}
    products = list(products_of(task))
    for product in dict.fromkeys(products):
        ways = {name: make(product, dtype) for name, make in makers.items()}
        for index, way in enumerate(WAYS):
            times = {name: [] for name in makers}
            for _ in range(repeats + 1):
                for name, runs in ways.items():
                    start = time.perf_counter()
                    runs[index]()
                    times[name].append(time.perf_counter() - start)
            for name, each in times.items():  # the first compiles
                spent[name][way] += statistics.median(each[1:]) * products.count(product)
    operations = sum(product.operations for product in products)
    return {
        name: {
            "milliseconds": {way: 1e3 * seconds for way, seconds in each.items()},
            "gflops_per_second": {way: operations / seconds / 1e9 for way, seconds in each.items()},
            "milliseconds_of_all": 1e3 * sum(each.values()),
        }
        for name, each in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {task: {dtype: measure(task, dtype, arguments.repeats) for dtype in DTYPES} for task in tasks.TASKS}
    text = json.dumps({"machine": describe("torch"), "tasks": found, "repeats": arguments.repeats}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
