"""PyTorch's training step of each case, as its users make it fast: AMP, channels last, compiled, a fused optimizer."""

import time
from typing import Any

import torch
import torch.nn.functional as F

from gpu.cases import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Case, Row
from gpu.torch_models import network


DTYPES = {"float32": None, "mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}
SKIPS = 20
"""As gpu.stepping's, which cannot be imported beside PyTorch: it would bring JAX."""


class Stepper:
    """A network, its optimizer and loss scale, and a batch that stays on the device."""

    def __init__(self, case: Case, row: Row, *, compiled: bool, full_precision: bool = False):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # A reference is not timed, and trying every algorithm of float32 takes a minute.
        torch.backends.cudnn.benchmark = not full_precision
        torch.backends.cudnn.allow_tf32 = not full_precision
        torch.set_float32_matmul_precision("highest" if full_precision else "high")
        before = self._reset_peak()
        torch.manual_seed(0)
        model, source = network(case)
        self.model: Any = model.to(self.device).train()
        if case.side:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.dtype = DTYPES[row.policy]
        parameters = list(self.model.parameters())
        rate, decay = LEARNING_RATE[case.optimizer], WEIGHT_DECAY[case.optimizer]
        if case.optimizer == "adamw":
            self.optimizer: Any = torch.optim.AdamW(parameters, rate, weight_decay=decay, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, rate, MOMENTUM, weight_decay=decay, fused=True)
        self.scaler = torch.amp.GradScaler(self.device, enabled=row.dynamic)
        self.inputs, self.targets = self._batch(case)
        self.pieces = case.pieces if full_precision else 1
        self.loss_of: Any = torch.compile(self._loss) if compiled else self._loss
        start = time.perf_counter()
        self.first = self._first()
        self.facts: dict[str, Any] = {
            "parameters": sum(p.numel() for p in parameters),
            "compile_seconds": time.perf_counter() - start,
            "compiled": compiled,
            "model": source,
        }
        if self.device == "cuda":
            # Of a step as it will be from now on: the first ones try convolutions' algorithms out.
            self.optimizer.zero_grad(set_to_none=True)
            self._reset_peak()
            self.run()
            self.run()
            self.facts["device_peak_bytes"] = torch.cuda.max_memory_allocated() - before

    def run(self) -> None:
        """Starts a step; does not wait for it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.loss_of(self.inputs, self.targets)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def wait(self) -> None:
        """Returns when all steps are done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Gives memory that is not in use back to the device, where the other peers are."""
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None):
            logits = self.model(inputs)
            if logits.ndim == 3:  # texts: [B, T, V]
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return F.cross_entropy(logits, targets)

    def _batch(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        def classes(*shape: int) -> torch.Tensor:
            return torch.randint(case.classes, (case.batch, *shape), device=self.device)

        if case.length:
            tokens = classes(case.length + 1)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        images = torch.randn(case.batch, 3, case.side, case.side, device=self.device)
        places = (case.side, case.side) if case.name == "unet" else ()
        return images.contiguous(memory_format=torch.channels_last), classes(*places)

    def _first(self) -> dict[str, float]:
        """As gpu.stepping's: loss and gradient norm of the first step that is applied, and the loss after it."""
        for skipped in range(SKIPS):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward()
            self.scaler.unscale_(self.optimizer)
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if torch.isfinite(torch.tensor(norm)):
                second = self._backward()
                return {"loss": loss, "grad_norm": norm, "second_loss": second, "skipped": skipped}
        raise FloatingPointError(f"the gradients of {SKIPS} steps in a row were not finite")

    def _backward(self) -> float:
        """Adds up the gradients of the micro-batches; the loss of the whole batch."""
        total = 0.0
        for inputs, targets in zip(self.inputs.chunk(self.pieces), self.targets.chunk(self.pieces), strict=True):
            loss = self.loss_of(inputs, targets) / self.pieces
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        return total

    def _reset_peak(self) -> int:
        if self.device != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def describe() -> dict[str, Any]:
    """PyTorch's own versions and whether it sees a GPU."""
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,  # pyright: ignore[reportAttributeAccessIssue]
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
