"""DiT's numbers are those of the original's composition of timm's blocks in PyTorch, with the same weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models.diffusion import DiT
from mpjax.training import named


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
timm = pytest.importorskip("timm", reason="pip install -e '.[parity]'")

pytestmark = pytest.mark.extra

WIDTH, HEADS, DEPTH, PATCH, CLASSES, ROWS, COLUMNS, CHANNELS = 16, 2, 2, 2, 3, 8, 4, 3


class TorchBlock(torch.nn.Module):
    """As in the original, with timm's attention and MLP."""

    def __init__(self):
        super().__init__()
        from timm.layers import Mlp
        from timm.models.vision_transformer import Attention

        self.norm1 = torch.nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(WIDTH, num_heads=HEADS, qkv_bias=True)
        self.norm2 = torch.nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(WIDTH, 4 * WIDTH, act_layer=lambda: torch.nn.GELU(approximate="tanh"))
        self.modulation = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TorchDiT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from timm.layers import PatchEmbed

        self.patches = PatchEmbed((ROWS, COLUMNS), PATCH, CHANNELS, WIDTH)
        self.time = torch.nn.Sequential(torch.nn.Linear(256, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.labels = torch.nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(DEPTH)])
        self.norm = torch.nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(WIDTH, 2 * WIDTH))
        self.head = torch.nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, x, t, y):
        x = self.patches(x) + positions()
        # In float64: the original's own are off by 1e-7, which at a time of 999 is 1e-4 of an angle.
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128).float()
        angles = t[:, None].float() * frequencies[None]
        c = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.labels(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        x = x.reshape(len(x), ROWS // PATCH, COLUMNS // PATCH, PATCH, PATCH, CHANNELS)
        return torch.einsum("nhwpqc->nhpwqc", x).reshape(len(x), ROWS, COLUMNS, CHANNELS)


def positions():
    """The original's: a grid whose first coordinate is the column, each coordinate in half of the features."""
    grid = np.stack(np.meshgrid(np.arange(COLUMNS // PATCH), np.arange(ROWS // PATCH)), axis=0)

    def of(place):
        angles = np.einsum("m,d->md", place.reshape(-1), 1 / 10000 ** (np.arange(WIDTH // 4) / (WIDTH / 4)))
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    return torch.tensor(np.concatenate([of(grid[0]), of(grid[1])], axis=1), dtype=torch.float32)


def theirs_of(ours: dict) -> dict:
    """PyTorch's arrays by name, from ours by path."""

    def linear(path: str, rows: int) -> dict:
        kernel = np.asarray(ours[f"{path}/kernel"]).reshape(rows, -1)
        return {"weight": kernel.T, "bias": np.asarray(ours[f"{path}/bias"]).reshape(-1)}

    found = {
        "patches.proj": {
            "weight": np.transpose(ours["patches/kernel"], (3, 2, 0, 1)),
            "bias": np.asarray(ours["patches/bias"]),
        },
        "time.0": linear("condition/up", 256),
        "time.2": linear("condition/down", WIDTH),
        "labels": {"weight": np.asarray(ours["condition/labels/embedding"])},
        "modulation.1": linear("modulation", WIDTH),
        "head": linear("head", WIDTH),
    }
    for i in range(DEPTH):
        block = f"blocks/{i}"
        parts = [linear(f"{block}/attention/{name}", WIDTH) for name in ("query", "key", "value")]
        found[f"blocks.{i}.attn.qkv"] = {
            name: np.concatenate([part[name] for part in parts]) for name in ("weight", "bias")
        }
        found[f"blocks.{i}.attn.proj"] = linear(f"{block}/attention/out", WIDTH)
        found[f"blocks.{i}.mlp.fc1"] = linear(f"{block}/mlp/up", WIDTH)
        found[f"blocks.{i}.mlp.fc2"] = linear(f"{block}/mlp/down", 4 * WIDTH)
        found[f"blocks.{i}.modulation.1"] = linear(f"{block}/modulation", WIDTH)
    return {f"{layer}.{name}": torch.tensor(value) for layer, arrays in found.items() for name, value in arrays.items()}


def test_outputs_and_gradients_are_those_of_the_original():
    sizes = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "patch": PATCH}
    ours = DiT(image_shape=(ROWS, COLUMNS, CHANNELS), num_classes=CLASSES, **sizes, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    graph, params = nnx.split(ours)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.3, x.shape), jnp.float32), params)
    theirs = TorchDiT()
    theirs.load_state_dict(theirs_of(named(params)))

    images = random.standard_normal((3, ROWS, COLUMNS, CHANNELS), np.float32)
    times, labels = np.array([0, 500, 999], np.int32), np.array([0, 2, CLASSES], np.int32)
    factors = random.standard_normal(images.shape, np.float32)

    def loss(params):
        outputs = nnx.merge(graph, params)(jnp.asarray(images), jnp.asarray(times), jnp.asarray(labels))
        return jnp.mean(outputs * factors), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    wanted = theirs(torch.tensor(images.transpose(0, 3, 1, 2)), torch.tensor(times), torch.tensor(labels).long())
    torch.mean(wanted * torch.tensor(factors)).backward()
    assert wanted.abs().max() > 0.5
    np.testing.assert_allclose(outputs, wanted.detach(), rtol=1e-5, atol=1e-5 * float(wanted.detach().abs().max()))
    theirs_by_name = dict(theirs.named_parameters())
    mine = theirs_of(named(gradients))
    assert mine.keys() == theirs_by_name.keys()
    for name, gradient in mine.items():
        other = theirs_by_name[name].grad
        np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-5 * float(other.abs().max()), err_msg=name)
