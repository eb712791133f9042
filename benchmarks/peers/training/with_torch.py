"""PyTorch with torch.amp on the CPU, channels last, its fused optimizers; eager, and as torch.compile makes it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from peers import tasks
from peers.tasks import Dtype, TaskName, Weights


PACKAGES = ("torch",)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), batch_norm(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), batch_norm(out)
        self.shortcut = nn.ModuleDict()
        if channels != out:
            self.shortcut.update({"conv": nn.Conv2d(channels, out, 1, stride, bias=False), "norm": batch_norm(out)})

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.shortcut:
            x = self.shortcut["norm"](self.shortcut["conv"](x))
        return functional.relu(y + x)


class ResNet18(nn.Module):
    """See `tasks.STAGES`."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(tasks.CHANNELS, tasks.RESNET_WIDTH, 3, padding=1, bias=False)
        self.stem = nn.ModuleDict({"conv": conv, "norm": batch_norm(tasks.RESNET_WIDTH)})
        self.blocks = nn.Sequential(*(Block(i, o, stride) for _, i, o, stride in tasks.blocks_of_resnet()))
        self.head = nn.Linear(tasks.RESNET_WIDTH * 2 ** (tasks.STAGES - 1), tasks.CLASSES)

    def forward(self, x):
        x = functional.relu(self.stem["norm"](self.stem["conv"](x)))
        return self.head(self.blocks(x).mean((2, 3)))


class ViT(nn.Module):
    """See `tasks.PATCH`, of PyTorch's own encoder layers."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(tasks.CHANNELS, tasks.WIDTH, tasks.PATCH, tasks.PATCH)
        self.positions = nn.Parameter(torch.empty((tasks.SIDE // tasks.PATCH) ** 2, tasks.WIDTH))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    tasks.WIDTH,
                    tasks.HEADS,
                    4 * tasks.WIDTH,
                    dropout=0.0,
                    activation="gelu",
                    layer_norm_eps=tasks.LN_EPSILON,
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(tasks.DEPTH)
            )
        )
        self.norm = nn.LayerNorm(tasks.WIDTH, tasks.LN_EPSILON)
        self.head = nn.Linear(tasks.WIDTH, tasks.CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, tasks.BN_EPSILON, 1 - tasks.MOMENTUM)


def start(task: TaskName, dtype: Dtype, *, compiled: bool = False) -> Callable[[int], dict]:
    if dtype == "float16":
        raise ValueError("PyTorch's CPU kernels are for bfloat16")
    model = {"resnet18": ResNet18, "vit": ViT}[task]()
    model.load_state_dict(state_dict(task, tasks.weights_of(task)), strict=False)
    model = model.to(memory_format=torch.channels_last).train()
    if task == "resnet18":
        momentum = tasks.SGD["momentum"]
        optimizer = torch.optim.SGD(model.parameters(), tasks.SGD["learning_rate"], momentum, nesterov=True, fused=True)
    else:
        betas = (tasks.ADAM["b1"], tasks.ADAM["b2"])
        optimizer = torch.optim.Adam(
            model.parameters(), tasks.ADAM["learning_rate"], betas, tasks.ADAM["eps"], fused=True
        )
    casts = torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32")

    def forward(images, labels):
        with casts:
            logits = model(images.to(torch.float32).div(255))
        return functional.cross_entropy(logits.float(), labels), logits

    forward = torch.compile(forward) if compiled else forward
    batches = [
        (torch.from_numpy(batch["image"]).permute(0, 3, 1, 2), torch.from_numpy(batch["label"]).long())
        for batch in tasks.batches()
    ]

    def step(index: int) -> dict:
        images, labels = batches[index % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        loss, logits = forward(images, labels)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        accuracy = (logits.detach().argmax(-1) == labels).float().mean()
        return {"loss": loss.detach(), "accuracy": accuracy, "grad_norm": norm}

    return step


def state_dict(task: TaskName, weights: Weights) -> dict[str, torch.Tensor]:
    """The weights under PyTorch's names, in its order of axes."""
    found = {}
    for name, value in weights.items():
        if task == "vit" and "/attention/" in name:
            continue
        weight = torch.from_numpy(value)
        if name.endswith("kernel"):
            weight = weight.permute(3, 2, 0, 1) if weight.ndim == 4 else weight.T
        path = name.replace("mlp/up", "linear1").replace("mlp/down", "linear2")
        path = path.replace("/scale", "/weight").replace("/kernel", "/weight").replace("/", ".")
        found[path] = weight
    for block in range(tasks.DEPTH if task == "vit" else 0):
        path = f"blocks/{block}/attention"
        parts = [f"{path}/{name}" for name in ("query", "key", "value")]
        kernels = [weights[part + "/kernel"].reshape(tasks.WIDTH, -1).T for part in parts]
        found |= {
            f"blocks.{block}.self_attn.in_proj_weight": torch.cat([torch.from_numpy(kernel) for kernel in kernels]),
            f"blocks.{block}.self_attn.in_proj_bias": torch.cat(
                [torch.from_numpy(weights[part + "/bias"]).flatten() for part in parts]
            ),
            f"blocks.{block}.self_attn.out_proj.weight": torch.from_numpy(
                weights[path + "/out/kernel"].reshape(-1, tasks.WIDTH).T
            ),
            f"blocks.{block}.self_attn.out_proj.bias": torch.from_numpy(weights[path + "/out/bias"]),
        }
    return found
