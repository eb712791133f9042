"""The U-Net of diffusion gives the numbers of the same layers of PyTorch, with the same weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models.diffusion import DiffusionUNet
from mpjax.training import named


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")

pytestmark = pytest.mark.extra

WIDTH, CLASSES, HEADS = 12, 3, 2


class TorchResidual(torch.nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.norm1 = torch.nn.GroupNorm(math.gcd(32, channels_in), channels_in)
        self.conv1 = torch.nn.Conv2d(channels_in, channels, 3, padding=1)
        self.modulation = torch.nn.Linear(4 * WIDTH, 2 * channels)
        self.norm2 = torch.nn.GroupNorm(math.gcd(32, channels), channels)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, padding=1)
        if channels_in != channels:
            self.shortcut = torch.nn.Conv2d(channels_in, channels, 1)

    def forward(self, x, c):
        silu = torch.nn.functional.silu
        scale, shift = self.modulation(silu(c))[:, :, None, None].chunk(2, dim=1)
        change = self.norm2(self.conv1(silu(self.norm1(x)))) * (1 + scale) + shift
        return (self.shortcut(x) if hasattr(self, "shortcut") else x) + self.conv2(silu(change))


class TorchAttention(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = torch.nn.GroupNorm(math.gcd(32, channels), channels)
        self.attention = torch.nn.MultiheadAttention(channels, HEADS, batch_first=True)

    def forward(self, x):
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(pixels, pixels, pixels)[0].transpose(1, 2).reshape(x.shape)


class TorchUNet(torch.nn.Module):
    """Two resolutions: 20 pixels, without attention, and 10."""

    def __init__(self):
        super().__init__()
        wide = 2 * WIDTH
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.labels = torch.nn.Embedding(CLASSES + 1, 4 * WIDTH)
        self.stem = torch.nn.Conv2d(3, WIDTH, 3, padding=1)
        self.fine = torch.nn.ModuleList([TorchResidual(WIDTH, WIDTH), TorchResidual(WIDTH, WIDTH)])
        self.halving = torch.nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.coarse = torch.nn.ModuleList([TorchResidual(WIDTH, wide), TorchResidual(wide, wide)])
        self.coarse_attention = torch.nn.ModuleList([TorchAttention(wide), TorchAttention(wide)])
        self.middle = torch.nn.ModuleList([TorchResidual(wide, wide), TorchResidual(wide, wide)])
        self.middle_attention = TorchAttention(wide)
        self.rising = torch.nn.ModuleList([TorchResidual(wide + more, wide) for more in (wide, wide, WIDTH)])
        self.rising_attention = torch.nn.ModuleList([TorchAttention(wide) for _ in range(3)])
        self.doubling = torch.nn.Conv2d(wide, wide, 3, padding=1)
        self.last = torch.nn.ModuleList([TorchResidual(now + WIDTH, WIDTH) for now in (wide, WIDTH, WIDTH)])
        self.norm = torch.nn.GroupNorm(math.gcd(32, WIDTH), WIDTH)
        self.head = torch.nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x, t, y):
        silu = torch.nn.functional.silu
        half = WIDTH // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half).float()
        angles = t[:, None].float() * frequencies
        c = self.down(silu(self.up(torch.cat([angles.cos(), angles.sin()], dim=1)))) + self.labels(y)
        kept = [self.stem(x)]
        for block in self.fine:
            kept.append(block(kept[-1], c))
        kept.append(self.halving(kept[-1]))
        for block, attention in zip(self.coarse, self.coarse_attention, strict=True):
            kept.append(attention(block(kept[-1], c)))
        x = self.middle[1](self.middle_attention(self.middle[0](kept[-1], c)), c)
        for block, attention in zip(self.rising, self.rising_attention, strict=True):
            x = attention(block(torch.cat([x, kept.pop()], dim=1), c))
        x = self.doubling(torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest"))
        for block in self.last:
            x = block(torch.cat([x, kept.pop()], dim=1), c)
        return self.head(silu(self.norm(x)))


PLACES = {
    **{f"down/{i}/block": f"fine.{i}" for i in (0, 1)},
    "down/2/conv": "halving",
    **{f"down/{3 + i}/block": f"coarse.{i}" for i in (0, 1)},
    **{f"down/{3 + i}/attention": f"coarse_attention.{i}" for i in (0, 1)},
    **{f"middle/{i}/block": f"middle.{i}" for i in (0, 1)},
    "middle/0/attention": "middle_attention",
    **{f"up/{i}/block": f"rising.{i}" for i in range(3)},
    **{f"up/{i}/attention": f"rising_attention.{i}" for i in range(3)},
    "up/3/conv": "doubling",
    **{f"up/{4 + i}/block": f"last.{i}" for i in range(3)},
    "condition/up": "up",
    "condition/down": "down",
    "condition/labels": "labels",
}
"""Our paths and theirs, of what is not called alike."""


def theirs_of(ours: dict) -> dict:
    """PyTorch's arrays by name, from ours by path."""
    found, parts = {}, {}
    for path, array in ours.items():
        value = np.asarray(array)
        place, name = path.rsplit("/", 1)
        outer = next((o for o in PLACES if place == o or place.startswith(f"{o}/")), "")
        layer = (PLACES.get(outer, "") + place.removeprefix(outer)).replace("/", ".")
        if ".attention." in layer and layer.rsplit(".", 1)[1] in ("query", "key", "value"):
            weight = value.reshape(len(value), -1).T if name == "kernel" else value.reshape(-1)
            parts[layer, name] = weight
            continue
        if layer.endswith(".attention.out"):
            layer, value = layer.replace(".out", ".out_proj"), value.reshape(-1, value.shape[-1])
        kernel = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        right = np.ravel(value) if name == "bias" else np.ascontiguousarray(kernel if name == "kernel" else value)
        found[f"{layer}.{'bias' if name == 'bias' else 'weight'}"] = torch.tensor(right)
    for layer in sorted({layer.rsplit(".", 1)[0] for layer, _ in parts}):
        for name, other in (("kernel", "weight"), ("bias", "bias")):
            whole = np.concatenate([parts[f"{layer}.{part}", name] for part in ("query", "key", "value")])
            found[f"{layer}.in_proj_{other}"] = torch.tensor(whole)
    return found


def test_outputs_and_gradients_are_those_of_torch():
    sizes = {"width": WIDTH, "depth": 1, "heads": HEADS}
    ours = nnx.eval_shape(
        lambda: DiffusionUNet(image_shape=(20, 20, 3), num_classes=CLASSES, **sizes, rngs=nnx.Rngs(0))
    )
    random = np.random.default_rng(0)
    graph, params = nnx.split(ours)

    def drawn(path: tuple, leaf) -> jax.Array:
        """Of a size that keeps the last bits of float32 small, where gradients of both libraries are summed."""
        fan = max(math.prod(leaf.shape[:-1]), 1)
        center, spread = (1.0, 0.1) if "scale" in str(path) else (0.0, 0.1 if len(leaf.shape) == 1 else fan**-0.5)
        return jnp.asarray(random.normal(center, spread, leaf.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(drawn, params)
    theirs = TorchUNet()
    theirs.load_state_dict(theirs_of(named(params)))
    images = random.standard_normal((3, 20, 20, 3), np.float32)
    times, labels = np.array([0, 500, 999], np.int32), np.array([0, 2, CLASSES], np.int32)
    factors = random.standard_normal(images.shape, np.float32)

    def loss(params):
        outputs = nnx.merge(graph, params)(jnp.asarray(images), jnp.asarray(times), jnp.asarray(labels))
        return jnp.mean(outputs * factors), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    wanted = theirs(torch.tensor(images.transpose(0, 3, 1, 2)), torch.tensor(times), torch.tensor(labels).long())
    wanted = wanted.permute(0, 2, 3, 1)
    torch.mean(wanted * torch.tensor(factors)).backward()
    most = float(wanted.detach().abs().max())
    assert most > 0.3
    np.testing.assert_allclose(outputs, wanted.detach(), rtol=0, atol=1e-5 * most)
    theirs_by_name = dict(theirs.named_parameters())
    mine = theirs_of(named(gradients))
    assert mine.keys() == theirs_by_name.keys()
    largest = max(float(other.grad.abs().max()) for other in theirs_by_name.values())
    for name, gradient in mine.items():
        other = theirs_by_name[name].grad
        size = max(float(other.abs().max()), 1e-2 * largest)
        np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-5 * size, err_msg=name)
