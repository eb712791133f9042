"""Writes the texts of sounds, with the model of a run or of a folder of Hugging Face files."""

import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from mpjax import strict_json
from mpjax.commands.evaluate import open_to_predict, trained_state
from mpjax.commands.model_of_files import folder_of, plan_of_files
from mpjax.config.commands import Prediction
from mpjax.config.schema import Config, with_settings
from mpjax.data.audio.given import given_sounds
from mpjax.data.audio.sound_files import SOUND
from mpjax.data.audio.speech_tokens import prompt_of, suppressed_in
from mpjax.data.audio.transcripts import ANSWERS, TARGET
from mpjax.data.given import Inputs, given_split
from mpjax.data.text.tokenizers import PLAIN, find_tokenizer, load_tokenizer
from mpjax.data.text.written import Written
from mpjax.errors import UsageError, printable
from mpjax.models.generation.continuations import generate
from mpjax.models.generation.programs import uncast
from mpjax.models.generation.sampling import Sampling
from mpjax.models.pretrained.files import find_folder
from mpjax.models.whisper.folder import load_whisper
from mpjax.models.whisper.generation import split_whisper
from mpjax.models.whisper.network import Whisper
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


BATCH = 8
"""Sounds of a batch, unless `--batch_size` says otherwise. Each has a cache of its own."""


class Transcription(NamedTuple):
    """A model of sounds, taken apart, its tokenizer, and the sounds."""

    model: Any
    cast: Callable[[Callable], Callable]
    tokenizer: Any
    inputs: Inputs


class Heard(NamedTuple):
    """A sound: its name, its number among all inputs, its features, and its text in the data, if it has one."""

    name: str
    number: int
    features: np.ndarray
    reference: str | None


def transcribe(settings: Prediction, config: Config | None, file: TextIO) -> int:
    """Writes the text of each sound as a JSON line of `file`, and returns their number.

    With `--split`, lines also have the text of the data as `reference`, its number of `words`, and `word_errors`; the
    word error rate of all is printed on stderr.

    Raises:
      UsageError: there is no such run, checkpoint or file, a sound cannot be read (with `settings.skip_bad`: none can),
        a setting has no meaning for sounds, or a logit is not finite.
    """
    _refuse_others(settings)
    made = _of_files(settings) if config is None else _of_run(settings, config)
    size, errors, words, count = settings.batch_size or BATCH, 0, 0, 0
    for batch in _batches(settings, made, size):
        for record in _records(settings, made, batch, size):
            print(strict_json.encode(record), file=file)
            errors, words = errors + record.get("word_errors", 0), words + record.get("words", 0)
            count += 1
        file.flush()
    if not count:
        raise UsageError(f"none of {len(made.inputs.names)} inputs could be read, see above")
    if words:
        print(f"word error rate {errors / words:.2%}: {errors:,} errors in {words:,} words", file=sys.stderr)
    return count


def _refuse_others(settings: Prediction) -> None:
    if settings.prompt:
        raise UsageError(f"--prompt: {settings.run} writes the texts of sounds: write wav or flac files in its place")
    if settings.chat or settings.json:
        raise UsageError("--chat and --json have no meaning for sounds: leave them out")


def _of_run(settings: Prediction, config: Config) -> Transcription:
    config = with_settings(config, {"training.remat": "none"})  # nothing is kept for a backward pass
    _, source, task = open_to_predict(settings, config)
    layout = Layout(make_mesh(jax.local_devices()[:1]))
    _, state, _ = trained_state(
        task, config, source, pathlib.Path(settings.run), settings.checkpoint, layout, ema=settings.ema
    )
    model: Any = task.structure.assemble(state.averaged if settings.ema else state.params, state.stats)
    if not isinstance(model, Whisper):
        raise UsageError(f"{type(model).__name__} cannot write texts of sounds: wanted hf:FOLDER of a Whisper")
    inputs = given_split(source, config.data) if settings.split else given_sounds(settings.inputs, config.data)
    folder = find_folder(config.model.folder)
    return _made(model, task.cast, folder, config.data.tokenizer, config.data.language, inputs)


def _of_files(settings: Prediction) -> Transcription:
    if settings.split:
        raise UsageError(f"--split: {settings.run} is a model without a run, and has no data set: write files")
    folder, plan = folder_of(settings), plan_of_files(settings)
    folder = folder.resolve()  # a path, also where its name is that of a tokenizer or of features
    data = with_settings(Config().data, {"features": str(folder)})
    inputs = given_sounds(settings.inputs, data)
    model = load_whisper(folder, policy=plan.module_policy)
    return _made(model, uncast, folder, str(folder), settings.language, inputs)


def _made(
    model: Whisper, cast: Callable, folder: pathlib.Path, tokenizer: str, language: str, inputs: Inputs
) -> Transcription:
    loaded = load_tokenizer(tokenizer)
    loaded.text_of([])  # raises, before anything is computed, where tokens have no text
    suppressed, suppressed_first = suppressed_in(folder)
    if suppressed + suppressed_first and not _is_in(tokenizer, folder):
        print(f"the tokens that {folder} suppresses are not those of {tokenizer}: none is suppressed", file=sys.stderr)
        suppressed, suppressed_first = (), ()
    prompt = prompt_of(tokenizer, loaded, language)
    parts = split_whisper(model, prompt=prompt, suppressed=suppressed, suppressed_first=suppressed_first)
    return Transcription(parts, cast, loaded, inputs)


def _is_in(tokenizer: str, folder: pathlib.Path) -> bool:
    """True if a tokenizer is that of a folder."""
    if tokenizer in PLAIN:
        return False
    path = find_tokenizer(tokenizer)
    return (path if path.is_dir() else path.parent).resolve() == folder.resolve()


def _batches(settings: Prediction, made: Transcription, size: int) -> Iterator[list[Heard]]:
    batch: list[Heard] = []
    for number, name in enumerate(made.inputs.names):
        try:
            arrays = made.inputs.to_arrays(made.inputs.load([number])[0])
        except (UsageError, OSError) as error:
            if not settings.skip_bad:
                raise
            print(printable(f"skipped: {error}"), file=sys.stderr)
            continue
        reference = None
        if TARGET in arrays:
            tokens = arrays[TARGET][0][arrays[ANSWERS][0]]
            is_whole = made.tokenizer.end in tokens  # a text that is cut has no end
            reference = made.tokenizer.text_of(tokens[tokens != made.tokenizer.end]) if is_whole else None
            if not is_whole:
                print(printable(f"{name}: its text is cut (--data.length), so words are not counted"), file=sys.stderr)
        batch.append(Heard(name, number, arrays[SOUND][0], reference))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _records(settings: Prediction, made: Transcription, batch: list[Heard], size: int) -> Iterator[dict[str, Any]]:
    """Yields a line for each sound of a batch, which is filled up to `size`, so that no other program is compiled."""
    filled = batch + [batch[-1]] * (min(size, len(made.inputs.names)) - len(batch))
    texts = [Written(made.tokenizer, [], settings.stop) for _ in filled]
    pieces: list[list[str]] = [[] for _ in filled]

    def watch(index: int, token: int) -> bool:
        pieces[index].append(texts[index].add(token))
        return texts[index].stopped

    written = generate(
        made.model,
        [heard.features for heard in filled],  # pyright: ignore[reportArgumentType]  # sounds in place of tokens
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        seed=settings.seed,
        end=(made.tokenizer.end,),
        watch=watch,
        numbers=[heard.number for heard in filled],
        names=[heard.name for heard in filled],
        cast=made.cast,
    )
    for index, heard in enumerate(batch):
        text = "".join([*pieces[index], texts[index].end()])
        stopped = "stop" if texts[index].stopped else written[index].stopped
        record = {"input": heard.name, "text": text, "tokens": len(written[index].tokens), "stopped": stopped}
        if heard.reference is not None:
            wanted = heard.reference.split()
            errors = word_errors(wanted, text.split())
            record |= {"reference": heard.reference, "words": len(wanted), "word_errors": errors}
        yield record


def word_errors(wanted: Sequence[str], written: Sequence[str]) -> int:
    """The fewest words to replace, leave out or insert that make one text of another (Levenshtein's distance).

    >>> word_errors("the cat sat".split(), "a cat sat down".split())
    2
    """
    row = [*range(len(written) + 1)]
    for number, word in enumerate(wanted, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(written, 1):
            replaced = before + (word != other)
            before, row[place] = row[place], min(replaced, row[place] + 1, row[place - 1] + 1)
    return row[-1]
