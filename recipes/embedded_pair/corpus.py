"""The corpus of the embedded pair: the running Python's own standard library, cut into token files.

A file belongs to the held-out split by the hash of its path alone, so that the split is the same
on every machine and no text of a held-out file is ever trained on. Tables of numbers and escapes
(character maps, test vectors) are left out: they are not code one would want completed.
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
HELD_OUT_PER_THOUSAND = 40
BEGIN, END = "<|begin|>", "<|end|>"
LEFT_OUT_FOLDERS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3", "idlelib"}
MIN_LETTER_SHARE = 0.45  # of the characters that are not blank
# Words keep their leading blank; a line break keeps the indentation that follows it.
SPLIT = Regex(r"\n[ \t\n]*| ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|[ \t]+(?=\S)|\s+")


def standard_library_files() -> Iterator[tuple[str, str]]:
    """(path below the library's folder, text) of every file that is code, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        dense = [c for c in text if not c.isspace()]
        letters = sum(c.isalpha() for c in dense)
        if digest in seen or len(dense) < 200 or letters < MIN_LETTER_SHARE * len(dense):
            continue
        seen.add(digest)
        yield relative.as_posix(), text


def is_held_out(path: str) -> bool:
    """Whether the file is kept from training; a pure function of its path."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_THOUSAND


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte string has an encoding, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens and tokenizer")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    if (out / "corpus.json").exists():
        return
    files = list(standard_library_files())
    train = [text for path, text in files if not is_held_out(path)]
    held_out = [(path, text) for path, text in files if is_held_out(path)]
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(out / "tokenizer.json"))
    begin = tokenizer.token_to_id(BEGIN)
    end = tokenizer.token_to_id(END)
    counts = {}
    for name, texts in [("train", train), ("held_out", [text for _, text in held_out])]:
        ids = [[begin, *e.ids, end] for e in tokenizer.encode_batch(texts)]
        flat = np.concatenate([np.asarray(row, dtype=np.uint16) for row in ids])
        np.save(out / f"{name}.npy", flat)
        counts[name] = {
            "files": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(flat),
        }
    (out / "held_out_paths.json").write_text(json.dumps([path for path, _ in held_out], indent=1))
    (out / "corpus.json").write_text(json.dumps(counts, indent=1))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
