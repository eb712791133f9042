"""The settings of the commands besides train and plan: one dataclass each, whose fields are its flags."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Annotated, Literal

import tyro

from mpjax.config.paths import expanded
from mpjax.config.schema import Config, Distributed
from mpjax.config.setting_types import CountOrZero, Integers, Limit, NotNegative, Texts, at_least, out_of_range
from mpjax.errors import UsageError


class CommandSettings:
    """Base class of the dataclasses with a command's own settings. Some commands take the settings of a run as well."""

    def check(self, run: Config | None = None) -> None:
        """Raises UsageError with a line for each setting out of range and for each of `faults(run)`.

        `run` has the settings of a run; None: the command takes none, and the defaults stand in.
        """
        if faults := [*out_of_range(self), *self.faults(run or Config())]:
            raise UsageError("\n".join(faults))

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message for each contradiction between settings, or with settings of `run`; by default none."""
        del run
        yield from ()


ENDINGS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")
"""Image formats of plots."""


def faults_of_image(flag: str, path: str) -> Iterator[str]:
    """Yields a message, which begins with `flag`, if `path` has no ending of `ENDINGS` or its folder does not exist.

    An empty path, which means no plot, has no fault.
    """
    ending = pathlib.PurePath(path).suffix
    folder = expanded(path).parent
    if path and ending.lower().removeprefix(".") not in ENDINGS:
        yield f"{flag} {path} ends in '{ending}': wanted .{', .'.join(ENDINGS)}"
    elif path and not folder.is_dir():
        yield f"{flag} {path}: there is no folder {folder}"


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""The platforms that JAX can compile a program for."""

LEAST = 20
"""The smallest number of updates of a learning-rate search: with fewer, a slope does not differ from noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(CommandSettings):
    """Evaluate a checkpoint on the test set of its run, with the run's precision policy or another."""

    run: str
    """Folder of the run."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    policy: str = ""
    """Precision policy; empty: the policy of the run."""
    split: str = ""
    """Split of the data set to evaluate on, such as `test` or `train[80%:]`; empty: the test split of the run."""
    ema: bool = False
    """Evaluate the exponential moving average of the parameters."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    json: bool = False
    """Print one JSON object instead of lines."""


FROM_FILES = "hf:"
"""The prefix of a model of Hugging Face files in place of a run."""

_OF_TEXTS = ("json", "chat", "max_tokens", "stop", "temperature", "top_k", "top_p")
"""The settings of texts that are continued."""
_OF_IMAGES = ("sampler_steps", "eta", "guidance", "classes")
"""The settings of images that are drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(CommandSettings):
    """Predict with a checkpoint of a run: a JSON line for each image, text, row or example of a split, in order.

    Images are files, folders or quoted globs. Texts are the lines of files, or of stdin for `-`, or a column of .csv,
    .tsv and .jsonl files. Rows are those of .csv, .tsv and .parquet files. Sounds are .wav and .flac files. They are
    read as the run's evaluation reads its data set, which need not be there. A language model continues the texts of
    --prompt, and with --generate those of the inputs; a model of transcription writes the texts of sounds. A
    diffusion draws --images."""

    inputs: Annotated[tyro.conf.Positional[Texts], tyro.conf.arg(metavar="INPUT ...")] = ()
    """Images, sounds, or files of texts or rows."""
    run: str
    """Folder of the run. To continue texts: also `hf:FOLDER`, a folder of Hugging Face files or an id on the hub."""
    split: str = ""
    """Split of the run's data set to predict instead of inputs, such as `test` or `train[80%:]`."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    policy: str = ""
    """Precision policy; empty: the policy of the run, and float32 for `hf:FOLDER`."""
    ema: bool = False
    """Predict with the exponential moving average of the parameters."""
    top: Annotated[int, at_least(1)] = 5
    """Most probable classes to print, at most all."""
    column: str = "text"
    """Column of the texts in .csv, .tsv and .jsonl files."""
    output: str = ""
    """File of the JSON lines; empty: stdout. For segmentation: folder of the masks, as PNG with class numbers.
    For --images: their folder, or a file `.png` of all in a grid."""
    batch_size: Annotated[int, at_least(0)] = 0
    """Examples per batch; 0: as in the run's evaluation, and 8 texts to continue."""
    skip_bad: bool = False
    """Report an input that cannot be read on stderr and go on without it."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    prompt: Texts = ()
    """Texts to continue with a language model. They are printed as they are written, one after the other."""
    generate: bool = False
    """Continue the inputs with a language model: a JSON line for each."""
    chat: bool = False
    """Put each prompt into the chat template of the tokenizer, as a message of the user, and write the answer. A run of
    conversations always does."""
    language: str = ""
    """Sounds, with a Whisper of `hf:FOLDER`: their language, as in `en`; empty: that in its generation_config.json. A
    run has that of its training."""
    json: bool = False
    """Print a JSON line for each `--prompt` too. So does `--output`."""
    max_tokens: Annotated[int, at_least(1)] = 128
    """Most tokens of a text. It also ends with an end-of-text token, and at the length of the model."""
    stop: Texts = ()
    """Strings that end a text, which ends before the first of them."""
    temperature: NotNegative = 0.0
    """Divisor of the logits, from which a token is then drawn; 0: take the most probable token."""
    top_k: Annotated[int, at_least(0)] = 0
    """Draw from this many of the most probable tokens; 0: from all."""
    top_p: Annotated[float, Limit("more than 0 and at most 1", lambda value: 0 < value <= 1)] = 1.0
    """Draw from the fewest tokens that have this probability together; 1: from all."""
    seed: Annotated[int, Limit("0 to 2**32 - 1", lambda seed: 0 <= seed < 2**32)] = 0
    """Seed of the draws: the same one gives the same texts and images."""
    images: CountOrZero = 0
    """Number of images to draw with a run of --task diffusion."""
    sampler_steps: Annotated[int, Limit("1 to 1000", lambda value: 1 <= value <= 1000)] = 50
    """Images: steps of the sampler, DDIM, from noise to an image."""
    eta: Annotated[float, Limit("0 to 1", lambda value: 0 <= value <= 1)] = 0.0
    """Images: share of the noise that DDPM adds in each step; 0: none, an image follows from its first noise."""
    guidance: NotNegative = 1.0
    """Images: weight of the class against the output for no class (classifier-free guidance); 1: the class alone,
    0: no class."""
    classes: Texts = ()
    """Images: classes to draw, by name or number, in turn; empty: all."""

    @property
    def _changed(self) -> frozenset[str]:
        """The settings that differ from their defaults."""
        return frozenset(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)

    @property
    def continues(self) -> bool:
        """Whether texts are continued."""
        return self.generate or bool(self.prompt)

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message for inputs that are missing or of two kinds, and for each setting without a meaning."""
        ways = {"inputs": self.inputs, "--split": self.split, "--prompt": self.prompt, "--images": self.images}
        named = [name for name, value in ways.items() if value]
        if len(named) != 1:
            which = f"both {' and '.join(named)}" if named else "neither inputs nor --split nor --prompt nor --images"
            yield f"{which}: wanted one, such as photos/ or 'photos/*.jpg' or --split test"
        usual = Prediction(run="")
        if self.images:
            others, why = ("top", "column", "skip_bad", *_OF_TEXTS), "images that are drawn"
        elif self.continues:
            others, why = ("top", *_OF_IMAGES), "texts that are continued"
        else:
            others, why = (*_OF_TEXTS, "seed"), "what is not --prompt or --generate"
            yield from (f"--{name}: is for --images, a number of them" for name in _OF_IMAGES if name in self._changed)
        advice = "write --generate, or leave it out" if not (self.images or self.continues) else "leave it out"
        for name in others:
            if name in self._changed:
                yield f"--{name} has no meaning for {why}: {advice if name in _OF_TEXTS else 'leave it out'}"
        if self.images and self.generate:
            yield "--generate continues texts, and --images draws: leave one out"
        if self.guidance == 0 and self.classes:
            yield f"--classes {' '.join(self.classes)}: --guidance 0 draws without a class; leave one out"
        if self.json and self.generate:
            yield "--json: --generate prints JSON lines anyway; leave it out"
        if "" in self.stop:
            yield "--stop has an empty string, which every text begins with: leave it out"
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1):
            yield "--top_k and --top_p choose among draws, and --temperature is 0: write --temperature 1"
        if self.run.startswith(FROM_FILES) and not self.continues:
            yield (
                f"--run {self.run} is a model without a run. A decoder, a T5 and a Whisper write texts: write --prompt "
                f"or --generate; any other needs a run, of train.py --model.name {self.run}"
            )
        if self.run.startswith(FROM_FILES) and (self.ema or self.checkpoint != usual.checkpoint):
            yield f"--run {self.run} has no checkpoints: leave out --checkpoint and --ema"
        if self.language and not self.run.startswith(FROM_FILES):
            yield f"--language {self.language}: a run has the language of its training (--data.language); leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose(CommandSettings):
    """Diagnose whether precision is at fault: run one step of a run under its policy and in float32, find where they
    diverge, and find what repairs it."""

    run: str
    """Folder of the run."""
    step: CountOrZero = 0
    """Attempted step to diagnose, replayed from the checkpoint before it; 0: the step after the last checkpoint."""
    evaluation: bool = False
    """Diagnose the evaluation of the checkpoint after `--step` steps (0: of the last one) in place of a step."""
    policy: str = ""
    """Precision policy to diagnose; empty: the policy of the run."""
    loss_scale: NotNegative = 0.0
    """Loss scale of the step; 0: the loss scale of the run at that step."""
    tolerance: NotNegative = 0.05
    """Largest relative error of the loss, and largest share of a gradient's norm lost to underflow, that is healthy."""
    search: Literal["repair", "fastest", "none"] = "repair"
    """`repair`: find and verify the smallest set of modules that repairs the step when kept in float32.
    `fastest`: instead of a diagnosis, find the policy with the most half precision within the tolerance.
    `none`: no search."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    json: bool = False
    """Print one JSON object instead of text."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message for a set `loss_scale`, and for `search` "fastest", if `evaluation` is set too."""
        of_a_step = {"loss_scale": self.loss_scale, "search fastest": self.search == "fastest"}
        for name in (name for name, is_set in of_a_step.items() if self.evaluation and is_set):
            yield f"--{name} is about a step, and an evaluation has no backward pass: leave out --evaluation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(CommandSettings):
    """Export a checkpoint: its weights for mpjax or another library, or a program that needs JAX alone."""

    run: str
    """Folder of the run."""
    output: str
    """File to write: `.safetensors` for weights, any other ending for a program. With `--layout huggingface` and a
    model of `hf:FOLDER`, the folder to write, which transformers loads; with `--what adapter`, the folder for PEFT."""
    what: Literal["weights", "adapter", "program"] = "weights"
    """weights: the parameters, as safetensors, with adapters merged. adapter: the adapters of `--training.lora` alone,
    in PEFT's layout. program: the model with its weights, from a batch as it is stored to logits, as `jax.export`
    writes it."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    ema: bool = False
    """Write the exponential moving average of the parameters."""
    layout: Literal["mpjax", "huggingface", "timm"] = "mpjax"
    """Weights: library whose names and layouts the file uses; huggingface, timm only for models that they have too."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Weights, adapter: dtype of the parameters in the file; empty: the dtype in the checkpoint."""
    policy: str = ""
    """Programs: the precision to compute in; empty: the run's own."""
    platforms: Texts = ("cpu", "cuda")
    """Programs: the platforms that can run the file, of `cpu`, `cuda`, `rocm` and `tpu`."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message for each set flag that `what` does not use, and for a wrong ending or platform."""
        others = {"weights": ("policy", "platforms"), "adapter": ("policy", "platforms", "layout")}
        for name in others.get(self.what, ("layout", "dtype")):
            if getattr(self, name) != getattr(Export(run="", output=""), name):
                yield f"--{name} has no meaning for --what {self.what}: leave it out"
        if self.what != "weights" and self.output.endswith(".safetensors"):
            wanted = "the name of a folder" if self.what == "adapter" else "another ending"
            yield f"--output {self.output}: .safetensors is for --what weights; wanted {wanted}"
        if not self.platforms or not set(self.platforms) <= set(PLATFORMS):
            yield f"--platforms {' '.join(self.platforms)}: wanted some of {', '.join(PLATFORMS)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(CommandSettings):
    """Find where the training curves of runs diverge. Runs that differ only in the seed form a group, and their spread
    is its band. Every group is compared with the group of the first run."""

    runs: Annotated[tyro.conf.Positional[Texts], tyro.conf.arg(metavar="RUN RUN ...")]
    """Folders of two or more runs, or of the runs of `--seeds`."""
    seeds: Integers = ()
    """Seeds of each group to compare; empty: all."""
    metrics: Texts = ("train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm")
    """Metrics to compare, as named in metrics.jsonl."""
    band: Literal["range", "std"] = "range"
    """Band of a group: from the lowest to the highest seed, or two standard deviations around the mean."""
    tolerance: NotNegative = 0.05
    """Relative difference up to which two groups of one seed each count as equal."""
    smoothing: Annotated[int, Limit("1 or more reports", lambda value: value >= 1)] = 5
    """Number of logged values over which training curves (not the loss scale) are averaged; 1: no smoothing."""
    plot: str = "comparison.png"
    """Image file of the curves; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message if there are no runs or no metrics, and if the plot cannot be written."""
        if not self.runs:
            yield "no run to compare: wanted the folders of two or more"
        if not self.metrics:
            yield "--metrics is empty: wanted one or more, such as train/loss"
        yield from faults_of_image("--plot", self.plot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateSearch(CommandSettings):
    """Find a learning rate: train a few updates at rates that grow from the lowest to the highest, and suggest the rate
    at which the loss falls fastest.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run. Its length,
    learning rate, warm-up and schedule are not used."""

    lowest: float = 1e-6
    """Learning rate of the first update."""
    highest: float = 10.0
    """Learning rate of the last update."""
    updates: int = 100
    """Number of updates. Steps that are skipped because of an overflow are repeated at their rate."""
    stop_above: float = 4.0
    """Stop when the smoothed loss is this many times its smallest value."""
    json: bool = False
    """Print one JSON object instead of lines."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message for each invalid setting of the search, and for each setting of the run that it excludes."""
        if not 0 < self.lowest < self.highest < float("inf"):
            yield f"--lowest {self.lowest:g} --highest {self.highest:g}: wanted positive rates, the lowest first"
        if self.updates < LEAST:
            yield f"--updates {self.updates}: wanted at least {LEAST}"
        if not self.stop_above > 1:
            yield f"--stop_above {self.stop_above:g}: wanted a number above 1"
        if run.resume:
            yield "--resume: the search begins with fresh parameters; leave it out"
        if run.seeds:
            yield "--seeds: the search trains one model; write --seed"
        if run.distributed != Distributed():
            yield "--distributed: the search needs one process; leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnRay(CommandSettings):
    """Train on Ray. It starts a worker for each process of the run. If one dies, it starts all again from the last
    checkpoint.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run."""

    workers: Annotated[int, at_least(1)] = 1
    """Number of workers."""
    gpus: Annotated[int, at_least(-1)] = -1
    """GPUs of each worker; -1: one if the cluster has GPUs, else none."""
    cpus: Annotated[int, at_least(0)] = 1
    """CPUs that Ray reserves for each worker."""
    restarts: Annotated[int, at_least(-1)] = 3
    """Times that Ray starts the workers again after one has died; -1: without a limit."""
    address: str = ""
    """Address of the Ray cluster; empty: `$RAY_ADDRESS`, else the cluster that this machine belongs to, else this
    machine alone."""

    def faults(self, run: Config) -> Iterator[str]:
        """Yields a message if the settings of the run number its processes, which Ray does itself."""
        distributed = run.distributed
        if (distributed.coordinator, distributed.processes, distributed.process) != ("", 0, -1):
            yield "Ray numbers the processes: leave out --distributed.coordinator, processes and process"
        if distributed.elastic:
            yield "Ray starts workers again itself: leave out --distributed.elastic"
