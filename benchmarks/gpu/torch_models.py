"""The cases' networks in PyTorch: timm's where it has them and can be imported, else plain ones of the same design."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpu.cases import CASES, Case


def network(case: Case) -> tuple[nn.Module, str]:
    """A network, and whose it is: "timm VERSION" or "own"."""
    published = next(full for full in CASES if full.name == case.name)
    sizes = ("side", "classes", "width", "stages", "heads")
    if all(getattr(case, name) == getattr(published, name) for name in sizes) and (found := _from_timm(case)):
        return found
    makers = {"resnet50": ResNet, "resnet18": ResNet, "vit_b16": ViT, "gpt2": GPT2, "unet": UNet}
    return makers[case.name](case), "own"


def _from_timm(case: Case) -> tuple[nn.Module, str] | None:
    try:
        import timm
    except ImportError:
        return None
    if case.name == "resnet50":
        model = timm.create_model("resnet50", num_classes=case.classes, zero_init_last=True)
    elif case.name == "vit_b16":
        model = timm.create_model(
            "vit_base_patch16_224", num_classes=case.classes, class_token=False, global_pool="avg"
        )
    else:
        return None
    return model, f"timm {timm.__version__}"


class Residual(nn.Module):
    """A basic block or a bottleneck."""

    def __init__(self, channels_in: int, width: int, stride: int, *, bottleneck: bool):
        super().__init__()
        channels = (width, width, 4 * width) if bottleneck else (width, width)
        sizes = (1, 3, 1) if bottleneck else (3, 3)
        befores = (channels_in, *channels)
        strides = [1] * len(sizes)
        strides[sizes.index(3)] = stride
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(before, after, size, stride, size // 2, bias=False)
                for before, after, size, stride in zip(befores, channels, sizes, strides, strict=False)
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(after) for after in channels])
        nn.init.zeros_(self.norms[-1].weight)  # pyright: ignore[reportArgumentType]
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels[-1]:
            conv = nn.Conv2d(channels_in, channels[-1], 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if index < len(self.convs) - 1:
                y = F.relu(y)
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """With bottlenecks and the ImageNet stem, or with basic blocks and the small one."""

    def __init__(self, case: Case):
        super().__init__()
        bottleneck = case.name == "resnet50"
        size, stride = (7, 2) if bottleneck else (3, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, case.width, size, stride, size // 2, bias=False), nn.BatchNorm2d(case.width), nn.ReLU()
        )
        if bottleneck:
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], case.width
        for stage, depth in enumerate(case.stages):
            width = case.width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Residual(channels, width, stride, bottleneck=bottleneck))
                channels = 4 * width if bottleneck else width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, case.classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A pre-norm Transformer block, its attention by PyTorch's fused kernel."""

    def __init__(self, width: int, heads: int, *, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(size, length, width))
        gelu = "tanh" if self.causal else "none"
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=gelu))


class ViT(nn.Module):
    """Patches, blocks, and the mean over patches."""

    def __init__(self, case: Case):
        super().__init__()
        self.patches = nn.Conv2d(3, case.width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn((case.side // 16) ** 2, case.width))
        self.blocks = nn.Sequential(*[Block(case.width, case.heads, causal=False) for _ in range(case.stages[0])])
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class GPT2(nn.Module):
    """Causal blocks between an embedding and the products with it."""

    def __init__(self, case: Case):
        super().__init__()
        depth = case.stages[0]
        self.tokens = nn.Embedding(case.classes, case.width)
        self.positions = nn.Parameter(0.01 * torch.randn(case.length, case.width))
        self.blocks = nn.Sequential(*[Block(case.width, case.heads, causal=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(case.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "positions" not in name:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class TwoConvs(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, channels_in: int, width: int):
        layers = []
        for channels in (channels_in, width):
            layers += [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Halvings, doublings, and shortcuts between equal resolutions."""

    def __init__(self, case: Case):
        super().__init__()
        widths = [case.width * 2**level for level in range(case.stages[0] + 1)]
        self.down = nn.ModuleList([TwoConvs(*pair) for pair in zip([3, *widths], widths, strict=False)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths[:-1])])
        self.convs = nn.ModuleList([TwoConvs(2 * width, width) for width in reversed(widths[:-1])])
        self.head = nn.Conv2d(widths[0], case.classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = []
        for convs in list(self.down)[:-1]:
            fine.append(convs(x))
            x = F.max_pool2d(fine[-1], 2)
        x = self.down[-1](x)
        for up, convs, shortcut in zip(self.up, self.convs, reversed(fine), strict=True):
            x = convs(torch.cat([shortcut, up(x)], 1))
        return self.head(x)
