"""The settings of the command `plan`, and the parser of its XLA options."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from mpjax.config.commands import CommandSettings, faults_of_image
from mpjax.config.schema import Config, Mesh
from mpjax.config.setting_types import NOT_NEGATIVE, Limit, Texts, at_least, list_of
from mpjax.errors import UsageError


GpuName = Literal["v100", "a100", "l4", "h100", "h200", "b200"]

if TYPE_CHECKING:
    Gpus = tuple[GpuName, ...]
else:
    Gpus = Annotated[object, list_of(get_args(GpuName))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(CommandSettings):
    """Predict whether a run fits on a GPU and how fast it is, by compiling its training step. No GPU is needed.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run."""

    gpu: Gpus = ()
    """GPUs to plan for, one or more."""
    policies: Texts = ()
    """Precision policies to compare; empty: the policy of the run."""
    devices: Annotated[int, at_least(1)] = 1
    """GPUs that a batch is sharded over; memory and time are per GPU."""
    search: Literal["none", "mesh"] = "none"
    """mesh: compile the step for meshes of --devices GPUs, list them with memory, time and speed, and name the best;
    none: plan the mesh of the run."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto: the same as a run on that GPU, cuDNN's fused kernel where possible."""
    install: bool = False
    """Download XLA's compiler for CUDA to mpjax's cache folder first, where no other JAX program sees it: 175 MB, once
    for a version of jaxlib. Not needed where JAX is installed for a GPU."""
    memory_fraction: Annotated[float, Limit("a share above 0, at most 1", lambda fraction: 0 < fraction <= 1)] = 0.75
    """Share of GPU memory that a run may use, as XLA_PYTHON_CLIENT_MEM_FRACTION; the default is that of JAX."""
    vocabulary: Annotated[int, NOT_NEGATIVE] = 0
    """Vocabulary size, for a tokenizer that is not on this machine; 0: ask the tokenizer."""
    fit: bool = True
    """Estimate the largest batch that fits; needs at most one more compilation per policy and GPU."""
    verify: bool = False
    """Verify the largest batch by compiling it, with corrections if needed: up to five more compilations."""
    xla: Texts = ()
    """XLA options to compare with the defaults, one or more in each word: "xla_gpu_enable_triton_gemm=false"."""
    costliest: Annotated[int, NOT_NEGATIVE] = 10
    """Number of kinds of kernels to list with the module and source line of each, the costliest first."""
    receipt: bool = False
    """List which dtypes each product, sum over GPUs and update runs in, and what computes it, against the policy."""
    measure: bool = True
    """Also time the step if such a GPU is present, and report the measurement beside the prediction."""
    plot: str = ""
    """Image file of memory and time; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message if no GPU is named, a value is given twice, or the plot cannot be written.

        With `install`, no GPU is needed. Values of `gpu`, `policies` and `xla` have to differ. A search for the mesh
        has one policy, several devices and no mesh of the run.

        Raises:
          UsageError: as `xla_options`.
        """
        if not self.gpu and not self.install:
            yield "--gpu is empty: wanted one or more, such as h100"
        for name in ("gpu", "policies", "xla"):
            several = getattr(self, name)
            if twice := [value for i, value in enumerate(several) if value in several[:i]]:
                yield f"--{name} has {twice[0]} twice: wanted different ones"
        for words in self.xla:
            xla_options(words)
        if self.search == "mesh":
            yield from self._faults_of_search(run)
        yield from faults_of_image("--plot", self.plot)

    def _faults_of_search(self, run: Config) -> Iterator[str]:
        """Yields a message for each setting that a search for the mesh would choose itself, or cannot show."""
        if self.devices == 1:
            yield "--search mesh divides several GPUs, and --devices is 1: write --devices 8, or another number"
        if len(self.policies) > 1:
            yield (
                f"--search mesh compares meshes under one policy, and --policies has {len(self.policies)}: write "
                f"--policies {self.policies[0]}"
            )
        sizes = {name: size for name, size in run.mesh.sizes.items() if size != Mesh().sizes[name]}
        if sizes:
            flags = " ".join(f"--mesh.{name} {size}" for name, size in sizes.items())
            yield f"{flags} is what --search mesh chooses: leave it out, or leave out --search mesh to plan that mesh"
        lists = self.costliest not in (0, type(self).costliest)
        shown = {
            f"--costliest {self.costliest}": lists,
            "--xla": self.xla,
            "--receipt": self.receipt,
            "--verify": self.verify,
            "--plot": self.plot,
        }
        for flag in (flag for flag, value in shown.items() if value):
            yield f"{flag} is for one mesh, and --search mesh has many: leave it out, and plan the best mesh with it"


def xla_options(words: str) -> dict[str, Any]:
    """Parses XLA options, separated by spaces, to their values by name: true and false to bool, whole numbers to int.

    Other values stay text. Dashes before a name are dropped; of two values of one option, the last counts.

    >>> xla_options("xla_gpu_enable_triton_gemm=false xla_gpu_autotune_level=0")
    {'xla_gpu_enable_triton_gemm': False, 'xla_gpu_autotune_level': 0}

    Raises:
      UsageError: a word is not NAME=VALUE with a name that begins with `xla_`.
    """
    options: dict[str, Any] = {}
    for word in words.split():
        name, equals, value = word.partition("=")
        name = name.lstrip("-")
        if not equals or not value or not name.startswith("xla_"):
            raise UsageError(f"--xla has '{word}': wanted xla_NAME=VALUE, such as xla_gpu_enable_triton_gemm=false")
        number = value.removeprefix("-").isdecimal()
        options[name] = value == "true" if value in ("true", "false") else int(value) if number else value
    return options
