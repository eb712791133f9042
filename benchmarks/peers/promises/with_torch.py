"""PyTorch with autocast and GradScaler on the CPU, the loop as in its automatic mixed precision examples."""

import numpy as np
import torch

from peers.promises.loop import MOMENTUM, RATE, WEIGHT, Kind, NotOffered, Seen


class Net(torch.nn.Module):
    """See `loop.Kind`."""

    def __init__(self, kind: Kind):
        super().__init__()
        self.line = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.line.weight, WEIGHT)
        self.norm = torch.nn.BatchNorm1d(1, momentum=0.5) if kind == "norm" else torch.nn.Identity()

    def forward(self, x):
        return self.norm(self.line(x[:, None]))


class Loop:
    """The example's loop, gradient accumulation included."""

    def __init__(self, kind: Kind, scaler: torch.amp.GradScaler, accumulate: int, half_loss: bool):
        self.kind, self.scaler, self.accumulate, self.half_loss = kind, scaler, accumulate, half_loss
        self.net = Net(kind)
        self.optimizer = torch.optim.SGD(self.net.parameters(), RATE, MOMENTUM if kind == "norm" else 0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.taken = 0

    def step(self, x: np.ndarray) -> Seen:
        with torch.autocast("cpu", torch.float16, enabled=self.kind != "wide"):
            out = self.net(torch.from_numpy(x))
            out = out if self.half_loss else out.float()
            loss = (out - 1).square().mean() if self.kind == "norm" else out.mean()
        self.scaler.scale(loss / self.accumulate).backward()
        self.taken += 1
        if self.taken % self.accumulate == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
        moments = [state["momentum_buffer"] for state in self.optimizer.state.values() if "momentum_buffer" in state]
        arrays = {**self.net.state_dict(), **{f"momentum/{n}": m for n, m in enumerate(moments) if m is not None}}
        return Seen(
            weight=float(self.net.line.weight),
            state={name: value.detach().numpy().copy() for name, value in arrays.items()}
            | {"schedule": np.asarray(self.schedule.last_epoch)},
            scale=self.scaler.get_scale(),
            good_steps=self.scaler._get_growth_tracker(),
            loss=float(loss),
            loss_dtype=str(loss.dtype).removeprefix("torch."),
            programs=None,
        )


def start(
    kind: Kind, *, scale=None, interval=None, factor=None, minimum=None, accumulate: int = 1, half_loss: bool = False
) -> Loop:
    if minimum is not None:
        raise NotOffered("GradScaler has no smallest scale")
    given = {"init_scale": scale, "growth_interval": interval, "growth_factor": factor}
    scaler = torch.amp.GradScaler("cpu", **{k: v for k, v in given.items() if v is not None})
    return Loop(kind, scaler, accumulate, half_loss)


def gradients(values: np.ndarray, scale: float) -> torch.Tensor:
    """What GradScaler makes of float16 gradients that arrive with these values."""
    weight = torch.nn.Parameter(torch.zeros(values.shape, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    weight.grad = torch.from_numpy(values)
    try:
        scaler.unscale_(optimizer)
    except ValueError as error:
        raise NotOffered(f"GradScaler refuses them: {error}") from error
    return weight.grad


def unscaled(values: np.ndarray, scale: float) -> np.ndarray:
    return gradients(values, scale).detach().numpy()


def norm_of(values: np.ndarray) -> float:
    weight = torch.nn.Parameter(torch.zeros(values.shape, dtype=torch.float16))
    weight.grad = torch.from_numpy(values)
    return float(torch.nn.utils.clip_grad_norm_([weight], 1.0))


def batch_norm(x, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool):
    layer = torch.nn.BatchNorm2d(1, epsilon, 0.5).train(train)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        values = {"running_mean": mean, "running_var": var, "weight": scale, "bias": bias}
        for name, value in values.items():
            getattr(layer, name).fill_(value)
        y = layer(torch.from_numpy(np.asarray(x, np.float16))[:, None])
    running = layer.running_mean, layer.running_var
    assert running[0] is not None
    assert running[1] is not None
    return y.numpy(), float(running[0][0]), float(running[1][0])


def stopped_at_floor() -> str | None:
    return None  # a loop of one's own goes on; nothing offers to stop it
