"""Maps the tokens of two tokenizers to each other.

Tokens are compared by the bytes that they stand for, not by the tokenizer's way to write them:
byte-level BPE spells bytes with visible characters (`Ġthe`), SentencePiece writes a blank as `▁`
and a byte as `<0x0A>`, WordPiece marks what continues a word. Special tokens stand for no text:
they are compared by name, and by their role in the two models.

Dimension key: V the target's vocabulary, U the drafter's; v and u are ids of them.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outdraft.drafting.device.translated_model import VocabularyMap
from outdraft.models.shape import ModelShape
from outdraft.text.chat import special_tokens
from outdraft.text.detokenizer import BYTE_NAME, BYTE_OF

ROLES = ("bos_token", "eos_token", "pad_token")


class Vocabulary:
    """The token ids of one model, and what they stand for; each stands for one thing at most.

    Attributes:
        size: ids that the network has. Those that the tokenizer does not name stand for nothing,
            and so do the tokenizer's ids past them.
        roles: ids by the names of ROLES, as far as the model has them.
        ids_of: ids of ordinary tokens by their bytes, which need not be whole characters; the ids
            of single bytes that are written only where no other token fits come last.
        id_of: ids of special tokens by name, the unknown token among them.
        unknown: the id that stands for text without a token.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, roles: Mapping[str, int]) -> None:
        self.tokenizer, self.size, self.roles = tokenizer, size, roles
        state: dict[str, Any] = json.loads(tokenizer.to_str())
        names = {number: name for name, number in tokenizer.get_vocab().items() if number < size}
        unknown = _unknown_id(tokenizer, state["model"])
        added = tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special} | {unknown}
        read, fallbacks = _reader(state), set[int]()
        if state["model"].get("byte_fallback"):
            fallbacks = {number for number, name in names.items() if BYTE_NAME.fullmatch(name)}
        self.ids_of: defaultdict[bytes, list[int]] = defaultdict(list)
        for number in sorted(names.keys() - special, key=lambda one: (one in fallbacks, one)):
            name = names[number]
            text = bytes([int(name[3:5], 16)]) if number in fallbacks else read(name)
            if text:
                self.ids_of[text].append(number)
        self.id_of = {name: number for number, name in names.items() if number in special}
        self.unknown = unknown if unknown in names else None

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer, config: ModelShape) -> "Vocabulary":
        """Read a checkpoint; first tokenizer_config.json, for the token that ends a turn."""
        names = special_tokens(path)
        found = {role: tokenizer.token_to_id(names[role]) for role in ROLES if role in names}
        roles = {role: number for role, number in found.items() if number is not None}
        if config.bos_token_id is not None:
            roles.setdefault("bos_token", config.bos_token_id)
        if config.eos_token_ids:
            roles.setdefault("eos_token", config.eos_token_ids[0])
        return cls(tokenizer, config.vocab_size, roles)

    @property
    def num_tokens(self) -> int:
        """Ids that stand for something."""
        return sum(map(len, self.ids_of.values())) + len(self.id_of)


def map_vocabularies(target: Vocabulary, drafter: Vocabulary) -> VocabularyMap:
    """Pair equal tokens, one to one; the same vocabularies give the same map.

    Several ids may have the same text. Bytes that are only a fallback come last, lower ids first.
    """
    draft_of: dict[int, int] = {}
    for text, ids in target.ids_of.items():
        draft_of.update(zip(ids, drafter.ids_of.get(text, ()), strict=False))
    shared_names = target.id_of.keys() & drafter.id_of.keys()
    draft_of |= {target.id_of[name]: drafter.id_of[name] for name in shared_names}
    for role in ROLES:  # after names: models of one tokenizer may differ in roles
        v, u = target.roles.get(role, -1), drafter.roles.get(role, -1)
        are_special = v in target.id_of.values() and u in drafter.id_of.values()
        if are_special and v not in draft_of and u not in draft_of.values():
            draft_of[v] = u
    target_to_draft_V = torch.full((target.size,), drafter.unknown or 0, dtype=torch.int64)
    draft_to_target_U = torch.full((drafter.size,), -1, dtype=torch.int64)
    texts = [(v, text) for text, ids in target.ids_of.items() for v in ids]
    for v, text in [*texts, *((v, name.encode()) for name, v in target.id_of.items())]:
        if v not in draft_of and (stand_in := _stand_in(text, drafter)) is not None:
            target_to_draft_V[v] = stand_in
    shared = torch.tensor(sorted(draft_of.items()), dtype=torch.int64).reshape(-1, 2)
    target_to_draft_V[shared[:, 0]] = shared[:, 1]
    draft_to_target_U[shared[:, 1]] = shared[:, 0]
    return VocabularyMap(
        target_to_draft_V, draft_to_target_U, target.num_tokens, drafter.num_tokens
    )


def _stand_in(text: bytes, drafter: Vocabulary) -> int | None:
    """The last token of the drafter's own reading of a token that is not shared; None: the
    drafter's tokenizer cannot write it."""
    try:
        ids = drafter.tokenizer.encode(text.decode(), add_special_tokens=False).ids
    except UnicodeDecodeError:  # a part of a character
        return next(iter(drafter.ids_of.get(text[-1:], ())), None)
    except Exception:  # the library has no narrower one for a character that it does not know
        return None
    return ids[-1] if ids and ids[-1] < drafter.size else None


def _unknown_id(tokenizer: Tokenizer, model: Mapping[str, Any]) -> int | None:
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    name = model.get("unk_token")
    return None if name is None else tokenizer.token_to_id(name)


def _reader(state: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return the function from an ordinary token's name to its bytes, as the decoder has it."""
    if "ByteLevel" in _types(state["decoder"]) | _types(state["pre_tokenizer"]):

        def read_byte_level(name: str) -> bytes:
            if BYTE_OF.keys() >= set(name):
                return bytes(BYTE_OF[char] for char in name)
            return name.encode()  # added as it is

        return read_byte_level
    if state["model"]["type"] in ("WordLevel", "WordPiece"):
        mark: str = state["model"].get("continuing_subword_prefix") or ""  # WordLevel has none

        def read_word(name: str) -> bytes:
            is_inside = mark != "" and name.startswith(mark)
            return (name[len(mark) :] if is_inside else f" {name}").encode()

        return read_word
    return lambda name: name.replace("▁", " ").encode()


def _types(component: Mapping[str, Any] | None) -> set[str]:
    """Types of a tokenizer's component and of its parts."""
    if component is None:
        return set()
    parts = component.get("decoders") or component.get("pretokenizers") or []
    return {str(component["type"])}.union(*(_types(part) for part in parts))
