"""A tiny random target, drafter and heads with a real byte-level tokenizer, as if embedded."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from outdraft import assets
from outdraft.engine.stats import StatsTotal
from tests.folders import new_folder
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.heads import random_head

TEXT = """def add(left, right):
    return left + right

def subtract(left, right):
    return left - right
"""
PROMPTS = ("def add(left,", "return right -", "def subtract(", "left + right")
SPECIAL = ("<begin>", "<end>")
CHAT_TEMPLATE = (
    "<begin>{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Pair:
    """Directories of two checkpoints over one vocabulary."""

    target: Path
    drafter: Path
    chatting: Path  # the target with a chat template
    heads: dict[str, Path]  # of the target, by method


@cache
def pair() -> Pair:
    """Made once a session."""
    folder = new_folder()
    tokenizer = _tokenizer()
    shape = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 192}
    target = randomised(llama(**shape))
    drafter = randomised(llama(num_hidden_layers=1, **shape), seed=5)
    paths = [save(target, folder / "target"), save(drafter, folder / "drafter")]
    paths.append(save(target, folder / "chatting"))
    for path in paths:
        tokenizer.save(str(path / "tokenizer.json"))
    (paths[2] / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    heads = {kind: random_head(kind, paths[0], folder / kind) for kind in assets.HEADS}
    return Pair(*paths, heads)


def completed(token_ids, num_decoded=0, decode_s=0.0, decode_stats=None):
    """Stands for an EngineRun of one request, which is over."""
    return SimpleNamespace(
        token_ids=token_ids,
        num_decoded=num_decoded,
        decode_s=decode_s,
        decode_stats=decode_stats or StatsTotal(),
        origins=[],
    )


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=290,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer
