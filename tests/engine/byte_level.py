"""A small byte-level BPE tokenizer: every byte is a token, a few merges, two special tokens."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the cat sat on the mat", "stop here, stop there", "héllo wörld", "日本語 日本"]


@cache
def tokenizer() -> Tokenizer:
    """Shared and never changed; ids 0 and 1 are the special tokens <s> and </s>."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(CORPUS, trainer)
    return result


def with_start_token() -> Tokenizer:
    """The same, but it puts <s> before every text."""
    result = Tokenizer.from_str(tokenizer().to_str())
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return result


def byte_ids(text: str) -> list[int]:
    """Ids of a text, one token a byte."""
    names = byte_names()
    return [tokenizer().token_to_id(names[byte]) for byte in text.encode()]


@cache
def byte_names() -> dict[int, str]:
    """How byte-level BPE writes each byte (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
