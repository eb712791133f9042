"""Continues texts with the language model of a run, or of a folder of Hugging Face files."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from mpjax import strict_json
from mpjax.commands.evaluate import open_to_predict, trained_state
from mpjax.commands.model_of_files import folder_of, plan_of_files
from mpjax.config.commands import Prediction
from mpjax.config.schema import Config, with_settings
from mpjax.config.tasks import CHATS, NEXT_TOKEN
from mpjax.data.text.given import decoded, require_tables, stored_texts
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.template import Template
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.data.text.written import Written
from mpjax.errors import UsageError, printable
from mpjax.models.decoder.folder import load_decoder
from mpjax.models.folder_kinds import kind_of
from mpjax.models.generation.continuations import check_prompt, generate
from mpjax.models.generation.programs import SplitModel, split, uncast
from mpjax.models.generation.sampling import Sampling
from mpjax.models.pretrained.files import find_folder
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


BATCH = 8
"""Texts of a batch, unless `--batch_size` says otherwise. Each has a cache of its own."""


class TextGenerator(NamedTuple):
    """A language model with all that turns texts into texts.

    Attributes:
      model: the model, taken apart: a `SplitModel`, or a `SplitTargets`.
      cast: the casts of its policy per operation.
      tokenizer: its tokenizer.
      start: makes the tokens of a prompt.
      end: the end-of-text tokens.
      header: the column names of tables without a line of names.
      between: what is shown between a prompt and its continuation.
      apart: whether the model writes a text of its own, not what is behind a prompt.
    """

    model: Any
    cast: Callable[[Callable], Callable]
    tokenizer: Tokenizer
    start: Callable[[str], list[int]]
    end: frozenset[int]
    header: tuple[str, ...] = ()
    between: str = ""
    apart: bool = False

    def written(self, prompt: list[int], stop: tuple[str, ...]) -> Written:
        """Begins the text behind a prompt, or beside it."""
        return Written(self.tokenizer, [] if self.apart else prompt, stop)


class Prompt(NamedTuple):
    """A text to continue: its name, its number among all inputs, the text, and its tokens."""

    name: str
    number: int
    text: str
    tokens: list[int]


def continue_texts(settings: Prediction, config: Config | None, file: TextIO) -> int:
    """Continues the prompts of the settings, and returns their number.

    The texts of `--prompt` go to stdout as they are written. With `--json` or `--output`, and for inputs, each is a
    JSON line of `file`. `config` are the settings of the run; None: the model is that of `hf:FOLDER`.

    Raises:
      UsageError: there is no such run, checkpoint or file, the model is no language model of mpjax, a prompt cannot be
        read or leaves no room (with `settings.skip_bad`: none can), or a logit is not finite.
    """
    if settings.split:
        raise UsageError("--generate continues inputs: write files in place of --split")
    generator = _of_files(settings) if config is None else _of_run(settings, config)
    generator.tokenizer.text_of([])  # raises, before anything is computed, where tokens have no text
    prompts = _prompts(settings, generator)
    if settings.prompt and not settings.json and not settings.output:
        for index, prompt in enumerate(prompts):
            _shown(settings, generator, prompt, first=index == 0)
        return len(prompts)
    size = min(settings.batch_size or BATCH, len(prompts))
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        for record in _records(settings, generator, batch, size):
            print(strict_json.encode(record), file=file)
        file.flush()
    return len(prompts)


def _of_run(settings: Prediction, config: Config) -> TextGenerator:
    writers = (*NEXT_TOKEN, "text_to_text")
    if config.task not in writers:
        raise UsageError(
            f"the run in {settings.run} is for {config.task}: --prompt and --generate want one with --task "
            f"{' or '.join(writers)}"
        )
    config = with_settings(config, {"training.remat": "none"})  # nothing is kept for a backward pass
    _, source, task = open_to_predict(settings, config)
    layout = Layout(make_mesh(jax.local_devices()[:1]))
    _, state, _ = trained_state(
        task, config, source, pathlib.Path(settings.run), settings.checkpoint, layout, ema=settings.ema
    )
    model = task.structure.assemble(state.averaged if settings.ema else state.params, state.stats)
    header = tuple(config.data.header)
    if config.task == "text_to_text":
        return _of_targets(settings, model, task.cast, config.data.tokenizer, header)
    parts = split(model, cast=task.cast)
    files = _ends(find_folder(config.model.folder)) if config.model.folder else frozenset()
    if settings.chat or config.task in CHATS:
        return _of_chats(config.data.tokenizer, parts, task.cast, files, header)
    tokenizer = load_tokenizer(config.data.tokenizer)

    def start(text: str) -> list[int]:
        """As in training, an end-of-text token stands before a text."""
        return [tokenizer.end, *tokenizer.whole([text]).values.tolist()]

    return TextGenerator(parts, task.cast, tokenizer, start, files | {tokenizer.end}, header)


def _of_files(settings: Prediction) -> TextGenerator:
    folder, plan = folder_of(settings), plan_of_files(settings)
    kind = kind_of(folder)
    if kind not in ("decoder", "t5"):
        raise UsageError(
            f"--run {settings.run} is a network of the kind {kind}, which writes texts in a run alone, if any: "
            f"write --run FOLDER of a run that train.py made with --model.name {settings.run}"
        )
    if kind == "t5":
        from mpjax.models.t5.folder import load_t5  # local, because few texts are written by a T5

        return _of_targets(settings, load_t5(folder, policy=plan.module_policy), uncast, str(folder), ())
    model = split(load_decoder(folder, policy=plan.module_policy))
    if settings.chat:
        return _of_chats(str(folder), model, uncast, _ends(folder))
    tokenizer = load_tokenizer(str(folder))

    def start(text: str) -> list[int]:
        """Tokenizes a whole text, with the special tokens that the tokenizer itself puts before and behind it."""
        return tokenizer.framed([text], 1 << 30).values.tolist()

    return TextGenerator(model, uncast, tokenizer, start, _ends(folder) or frozenset({tokenizer.end}))


def _of_targets(
    settings: Prediction, model: Any, cast: Callable, tokenizer: str, header: tuple[str, ...]
) -> TextGenerator:
    """Makes the generator of targets from sources, which end with the end-of-text token, as in training.

    Raises:
      UsageError: prompts are to be chats, or the model is the user's own.
    """
    from mpjax.models.t5.generation import split_t5  # local, because few texts are written by a T5
    from mpjax.models.t5.network import T5

    if settings.chat:
        raise UsageError(f"--chat: {settings.run} writes targets from sources, without a chat template; leave it out")
    if not isinstance(model, T5):
        raise UsageError(f"{type(model).__name__} cannot write targets: --prompt and --generate want hf:FOLDER of a T5")
    loaded = load_tokenizer(tokenizer)

    def start(text: str) -> list[int]:
        return [*loaded.whole([text]).values.tolist(), loaded.end]

    return TextGenerator(
        split_t5(model), cast, loaded, start, frozenset({loaded.end}), header, between="\n", apart=True
    )


def _of_chats(
    tokenizer: str, model: SplitModel, cast: Callable, ends: frozenset[int], header: tuple[str, ...] = ()
) -> TextGenerator:
    """Makes the generator of answers to prompts, by the chat template of a tokenizer.

    A text ends at one of `ends`, or at a special token with which the template or the tokenizer ends one.

    Raises:
      UsageError: as `load_chat`.
    """
    from mpjax.commands.chat import start_of_answer  # local, like all imports that few runs need
    from mpjax.data.text.instructions import load_chat

    chat = load_chat(tokenizer)
    ends |= chat.ends | {chat.tokenizer.end}
    return TextGenerator(model, cast, chat.tokenizer, start_of_answer(chat), ends, header, between="\n")


def _ends(folder: pathlib.Path) -> frozenset[int]:
    """The end-of-text tokens in the files of a model: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            tokens = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{file} cannot be read ({error}); fetch it again") from error
        tokens = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise UsageError(
                f"{file}: eos_token_id is {strict_json.encode(tokens)}: wanted one token or a list of them"
            )
        if tokens:
            return frozenset(tokens)
    return frozenset()


def _prompts(settings: Prediction, generator: TextGenerator) -> list[Prompt]:
    if settings.prompt:
        named = [(f"prompt {number}", lambda text=text: text) for number, text in enumerate(settings.prompt, 1)]
    else:
        if settings.column != Prediction(run="").column:
            require_tables(settings.inputs, settings.column)
        lines = stored_texts(settings.inputs, Template.alone(settings.column), header=generator.header)
        named = [(line.name, lambda line=line: decoded(line)) for line in lines]
    prompts = []
    for number, (name, read) in enumerate(named):
        try:
            text = read()
            tokens = generator.start(text)
            check_prompt(np.asarray(tokens), generator.model, name=name)
        except UsageError as error:
            if not settings.skip_bad:
                raise
            print(printable(f"skipped: {error}"), file=sys.stderr)
        else:
            prompts.append(Prompt(name, number, text, tokens))
    if not prompts:
        raise UsageError(f"none of {len(named)} inputs could be read, see above")
    return prompts


def _records(
    settings: Prediction, generator: TextGenerator, batch: list[Prompt], size: int
) -> Iterator[dict[str, Any]]:
    """Yields a line for each prompt of a batch, which is filled up to `size`, so that no other program is compiled."""
    filled = batch + [batch[-1]] * (size - len(batch))
    texts = [generator.written(prompt.tokens, settings.stop) for prompt in filled]
    pieces: list[list[str]] = [[] for _ in filled]

    def watch(index: int, token: int) -> bool:
        pieces[index].append(texts[index].add(token))
        return texts[index].stopped

    for index, made in enumerate(_generated(settings, generator, filled, watch)[: len(batch)]):
        rest = texts[index].end()
        text = "".join([*pieces[index], rest])
        # What was held back may end with a stop string, if an incomplete character was behind it.
        stopped = "stop" if texts[index].stopped else made.stopped
        prompt = batch[index]
        yield {
            "input": prompt.name,
            "prompt": prompt.text,
            "text": text,
            "tokens": len(made.tokens),
            "stopped": stopped,
        }


def _shown(settings: Prediction, generator: TextGenerator, prompt: Prompt, *, first: bool) -> None:
    """Prints a prompt and its continuation on stdout as it is written; between texts, an empty line."""
    text = generator.written(prompt.tokens, settings.stop)
    # A model may write what a terminal takes for a command.
    shown = _without_commands if sys.stdout.isatty() else str
    print(*([] if first else ["\n"]), shown(prompt.text), generator.between, sep="", end="", flush=True)

    def watch(_: int, token: int) -> bool:
        print(shown(text.add(token)), end="", flush=True)
        return text.stopped

    made = _generated(settings, generator, [prompt], watch)[0]
    print(shown(text.end()))
    if made.stopped == "length":
        print(
            f"{prompt.name}: the text is as long as the model takes, {generator.model.length} tokens", file=sys.stderr
        )


def _without_commands(text: str) -> str:
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _generated(
    settings: Prediction, generator: TextGenerator, prompts: list[Prompt], watch: Callable[[int, int], bool]
):
    return generate(
        generator.model,
        [prompt.tokens for prompt in prompts],
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        seed=settings.seed,
        end=generator.end,
        watch=watch,
        numbers=[prompt.number for prompt in prompts],
        names=[prompt.name for prompt in prompts],
        cast=generator.cast,
    )
