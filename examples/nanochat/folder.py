"""Writes a folder of Hugging Face files for a decoder that has not learned anything yet.

It has a byte-level BPE tokenizer, which is trained on the texts of some files, its chat template (ChatML), and the
config.json of a decoder of Qwen 3's kind. `train.py --model.name hf:FOLDER --model.pretrained none` begins with it.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterator

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


SIZES = {
    "d12": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 2048},
    "twin": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 384},
}
VOCABULARY = {"d12": 32_768, "twin": 2048}
LENGTH = {"d12": 2048, "twin": 256}

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


def texts(files: list[pathlib.Path], column: str, characters: int) -> Iterator[str]:
    """Yields the texts of files in order, until they have had so many characters; files are not read as a whole."""
    for file in files:
        if file.suffix not in READERS:
            raise SystemExit(f"{file}: wanted a file of {', '.join(READERS)}")
    for file in files:
        rows = datasets.load_dataset(READERS[file.suffix], data_files=str(file), split="train", streaming=True)
        for row in rows:
            if characters <= 0:
                return
            if column not in row:
                raise SystemExit(f"{file} has the columns {', '.join(row)}: name that of the texts by --column")
            characters -= len(row[column])
            yield row[column]


def trained(lines: Iterator[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE: every text is made of its tokens, and is what they decode to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, BEGIN_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise SystemExit(
            f"the texts give {tokenizer.get_vocab_size()} tokens, fewer than {vocabulary}: bring more text, or write "
            f"--vocabulary {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def config(size: str, tokenizer: Tokenizer) -> dict[str, object]:
    """The config.json: grouped queries are off, and the logits have a matrix of their own only in the large size."""
    sizes = SIZES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": LENGTH[size],
        "tie_word_embeddings": size == "twin",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }


def main() -> None:
    """Trains the tokenizer and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="texts: .jsonl, .parquet or .txt files")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the folder to write; it must not exist")
    parser.add_argument("--size", choices=SIZES, default="d12", help="the size of the decoder (default: d12)")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens (default: 32768, and 2048 for twin)")
    parser.add_argument("--column", default="text", help="the column of the texts (default: text)")
    parser.add_argument("--characters", type=int, default=10**9, help="read at most so many (default: 1e9)")
    given = parser.parse_args()
    if given.output.exists():
        raise SystemExit(f"{given.output} exists: write another folder, or remove it")
    lines = texts(given.files, given.column, given.characters)
    tokenizer = trained(lines, given.vocabulary or VOCABULARY[given.size])
    end, end_of_turn = tokenizer.token_to_id(END), tokenizer.token_to_id(END_TURN)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": LENGTH[given.size],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    given.output.mkdir(parents=True)
    tokenizer.save(str(given.output / "tokenizer.json"))
    for name, content in (
        ("config.json", config(given.size, tokenizer)),
        ("tokenizer_config.json", about),
        ("generation_config.json", {"eos_token_id": [end, end_of_turn]}),
    ):
        (given.output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sample = list(itertools.islice(texts(given.files, given.column, 10**6), 1000))
    per_token = sum(map(len, sample)) / sum(len(encoding.ids) for encoding in tokenizer.encode_batch(sample))
    print(f"{given.output}: {tokenizer.get_vocab_size():,} tokens, {per_token:.2f} characters each")


if __name__ == "__main__":
    main()
