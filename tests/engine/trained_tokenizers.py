"""Small tokenizers of the kinds that models have, trained on this repository's own text."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.engine.byte_level import byte_names

ROOT = Path(__file__).parents[2]
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def corpus() -> list[str]:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    return [*texts, "héllo wörld, 日本語 日本"]


def byte_level(vocab_size: int, special: tuple[str, ...] = ("<s>", "</s>")) -> Tokenizer:
    """BPE over the visible byte alphabet, as GPT-2's and Llama 3's."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(corpus(), trainer)
    return result


def sentencepiece_bpe(vocab_size: int) -> Tokenizer:
    """BPE with `▁` and byte fallback, as Llama 2's."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=SPECIAL,
        limit_alphabet=60,
        show_progress=False,
    )
    # Pieces of whole lines: a blank is a part of a piece.
    lines = [line for text in corpus() for line in text.split("\n")]
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(lines, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict.fromkeys([*SPECIAL, *byte_pieces()])
    vocab |= dict.fromkeys(model["vocab"])
    numbered = {name: number for number, name in enumerate(vocab)}
    merges = [tuple(pair) for pair in model["merges"]]
    return _with_fallback(
        models.BPE(numbered, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )


def sentencepiece_unigram(vocab_size: int) -> Tokenizer:
    """Unigram with `▁` and byte fallback, as T5's."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=SPECIAL,
        unk_token="<unk>",
        show_progress=False,
    )
    trained.train_from_iterator(corpus(), trainer)
    pieces = [(name, score) for name, score in json.loads(trained.to_str())["model"]["vocab"]]
    rare = min(score for _, score in pieces) - 10
    pieces[len(SPECIAL) : len(SPECIAL)] = [(name, rare) for name in byte_pieces()]
    return _with_fallback(models.Unigram(pieces, unk_id=0, byte_fallback=True))


def byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def decoded_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """By decoding one token behind another: what ordinary tokens add to a text. Slow.

    Parts of characters cannot be decoded alone: byte-level ones are spelled out, of the others
    there are the 256 byte pieces only.
    """
    spelled = {name: byte for byte, name in byte_names().items()}
    special = {n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    anchor = tokenizer.get_vocab().get("a", tokenizer.get_vocab().get("▁a"))
    before, pieces = tokenizer.decode([anchor]), set(byte_pieces())
    found: dict[int, bytes] = {}
    for name, number in tokenizer.get_vocab().items():
        if number in special or name == "<unk>":
            continue
        if name in pieces:
            found[number] = bytes([int(name[3:5], 16)])
            continue
        text = tokenizer.decode([anchor, number])[len(before) :]
        if "\ufffd" in text:
            found[number] = bytes(spelled[char] for char in name)
        else:
            found[number] = text.encode()
    return found


def _with_fallback(model: models.Model) -> Tokenizer:
    result = Tokenizer(model)
    result.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    result.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    result.add_special_tokens(SPECIAL)
    return result
