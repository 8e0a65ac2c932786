"""Maps the tokens of two tokenizers to each other.

Tokens are compared by the bytes that they stand for, not by the tokenizer's way to write them:
byte-level BPE spells bytes with visible characters (`Ġthe`), SentencePiece writes a blank as `▁`
and a byte as `<0x0A>`, WordPiece marks what continues a word. Special tokens stand for no text:
they are compared by name, and by their role in the two models.

Dimension key: V the target's vocabulary, U the drafter's.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outdraft.drafting.device.translated_model import VocabularyMap
from outdraft.models.shape import ModelShape
from outdraft.text.chat import special_tokens
from outdraft.text.detokenizer import BYTE_NAME, BYTE_OF

ROLES = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of one model.

    Attributes:
        size: ids that the network has. Those that the tokenizer does not name stand for nothing,
            and so do the tokenizer's ids past them.
        roles: ids by the names of ROLES, as far as the model has them.
    """

    tokenizer: Tokenizer
    size: int
    roles: Mapping[str, int]

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


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The meaning of a vocabulary's ids; each id is in `text_of` or `name_of` at most.

    Attributes:
        text_of: the bytes of ordinary tokens, which need not be whole characters.
        name_of: special tokens, the unknown token among them.
        fallbacks: ids of single bytes, written only where no other token fits.
        unknown: the id that stands for text without a token.
    """

    text_of: Mapping[int, bytes]
    name_of: Mapping[int, str]
    fallbacks: frozenset[int]
    unknown: int | None

    def __len__(self) -> int:
        return len(self.text_of) + len(self.name_of)


def token_table(vocabulary: Vocabulary) -> TokenTable:
    """The tokens below the vocabulary's size; ids that stand for nothing are left out."""
    tokenizer = vocabulary.tokenizer
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    names = {
        number: name
        for name, number in tokenizer.get_vocab().items()
        if 0 <= number < vocabulary.size
    }
    unknown = _unknown_id(tokenizer, state["model"])
    special = {
        number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or number == unknown
    }
    special |= {unknown} if unknown is not None else set()
    read = _reader(state)
    fallbacks: set[int] = set()
    if state["model"].get("byte_fallback"):
        fallbacks = {number for number, name in names.items() if BYTE_NAME.fullmatch(name)}
    texts = {
        number: bytes([int(name[3:5], 16)]) if number in fallbacks else read(name)
        for number, name in names.items()
        if number not in special
    }
    return TokenTable(
        text_of={number: text for number, text in texts.items() if text},
        name_of={number: names[number] for number in special if number in names},
        fallbacks=frozenset(fallbacks),
        unknown=unknown if unknown in names else None,
    )


def map_vocabularies(target: Vocabulary, drafter: Vocabulary) -> VocabularyMap:
    """Pair equal tokens, one to one; the same vocabularies give the same map.

    Several ids may have the same text. Bytes that are only a fallback come last, lower ids first.
    """
    tables = token_table(target), token_table(drafter)
    draft_of = _same_texts(*tables) | _same_names(*tables)
    for role in ROLES:  # after names: models of one tokenizer may differ in roles
        ids = target.roles.get(role, -1), drafter.roles.get(role, -1)
        are_special = ids[0] in tables[0].name_of and ids[1] in tables[1].name_of
        if are_special and ids[0] not in draft_of and ids[1] not in draft_of.values():
            draft_of[ids[0]] = ids[1]
    target_to_draft_V = torch.full((target.size,), tables[1].unknown or 0, dtype=torch.int64)
    draft_to_target_U = torch.full((drafter.size,), -1, dtype=torch.int64)
    for number, stand_in in _stand_ins(tables, draft_of, drafter).items():
        target_to_draft_V[number] = stand_in
    shared = torch.tensor(sorted(draft_of.items()), dtype=torch.int64).reshape(-1, 2)
    target_to_draft_V[shared[:, 0]] = shared[:, 1]
    draft_to_target_U[shared[:, 1]] = shared[:, 0]
    return VocabularyMap(target_to_draft_V, draft_to_target_U, len(tables[0]), len(tables[1]))


def _same_texts(target: TokenTable, drafter: TokenTable) -> dict[int, int]:
    """Draft ids of target ids with the same bytes."""
    of_target, of_drafter = _ids_by_text(target), _ids_by_text(drafter)
    pairs: dict[int, int] = {}
    for text, ids in of_target.items():
        pairs.update(zip(ids, of_drafter.get(text, []), strict=False))
    return pairs


def _ids_by_text(table: TokenTable) -> dict[bytes, list[int]]:
    ids: defaultdict[bytes, list[int]] = defaultdict(list)
    for number in sorted(table.text_of, key=lambda one: (one in table.fallbacks, one)):
        ids[table.text_of[number]].append(number)
    return ids


def _same_names(target: TokenTable, drafter: TokenTable) -> dict[int, int]:
    ids = {name: number for number, name in drafter.name_of.items()}
    return {number: ids[name] for number, name in target.name_of.items() if name in ids}


def _stand_ins(
    tables: tuple[TokenTable, TokenTable], draft_of: Mapping[int, int], drafter: Vocabulary
) -> dict[int, int]:
    """Per target token that is not shared, the last token of the drafter's own reading of it."""
    target, own = tables
    of_byte = {text: ids[0] for text, ids in _ids_by_text(own).items() if len(text) == 1}
    texts = {**target.text_of, **{v: name.encode() for v, name in target.name_of.items()}}
    found: dict[int, int] = {}
    for number, text in texts.items():
        if number in draft_of:
            continue
        try:
            last = _last_id(drafter, text.decode())
        except UnicodeDecodeError:  # a part of a character
            last = of_byte.get(text[-1:])
        if last is not None:
            found[number] = last
    return found


def _last_id(vocabulary: Vocabulary, text: str) -> int | None:
    """The last id of a text; None: the tokenizer cannot write it."""
    try:
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    except Exception:  # the library has no narrower one for a character that it does not know
        return None
    return ids[-1] if ids and ids[-1] < vocabulary.size else None


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
