"""Two vocabularies share the tokens that stand for the same bytes, and nothing else."""

from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel, WordPiece

from outdraft.text.vocabulary import Vocabulary, map_vocabularies
from tests.engine.trained_tokenizers import (
    byte_level,
    byte_pieces,
    decoded_bytes,
    sentencepiece_bpe,
    sentencepiece_unigram,
)

KINDS = {
    "byte-level": lambda: byte_level(420),
    "byte-level-larger": lambda: byte_level(700, ("<|end|>", "<s>")),
    "bpe": lambda: sentencepiece_bpe(500),
    "unigram": lambda: sentencepiece_unigram(560),
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


def vocabulary(own: Tokenizer, padding: int = 0, **roles: int) -> Vocabulary:
    return Vocabulary(own, own.get_vocab_size() + padding, roles)


def words(*names: str) -> Tokenizer:
    return Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))


def pairs(target: Vocabulary, drafter: Vocabulary) -> dict[int, int]:
    """Shared ids, target's to drafter's; both directions of the map must say the same."""
    found = map_vocabularies(target, drafter)
    draft_ids, target_ids = found.target_to_draft_V.tolist(), found.draft_to_target_U.tolist()
    assert (len(draft_ids), len(target_ids)) == (target.size, drafter.size)
    assert all(0 <= number < drafter.size for number in draft_ids)
    back = {v: u for u, v in enumerate(target_ids) if v >= 0}
    assert len(back) == found.num_shared == sum(v >= 0 for v in target_ids)  # one to one
    assert back == {v: draft_ids[v] for v in back}
    assert found.is_shared_V.nonzero()[:, 0].tolist() == sorted(back)
    return back


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_that_the_tokenizer_decodes(kind: str):
    table = vocabulary(tokenizer(kind))
    texts = {number: text for text, ids in table.ids_of.items() for number in ids}
    assert texts == decoded_bytes(tokenizer(kind))


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_tokens_are_shared_whose_decoded_bytes_are_equal(target: str, drafter: str):
    found = pairs(vocabulary(tokenizer(target)), vocabulary(tokenizer(drafter)))
    texts = decoded_bytes(tokenizer(target)), decoded_bytes(tokenizer(drafter))
    ordinary = {v: u for v, u in found.items() if v in texts[0]}
    assert all(texts[0][v] == texts[1][u] for v, u in ordinary.items())
    assert {texts[0][v] for v in ordinary} == set(texts[0].values()) & set(texts[1].values())
    names = [{own.id_to_token(i) for i in ids} for own, ids in special_ids(target, drafter)]
    rest = {tokenizer(target).id_to_token(v) for v in found if v not in texts[0]}
    assert rest == names[0] & names[1]


def special_ids(*kinds: str) -> list[tuple[Tokenizer, set[int]]]:
    return [
        (tokenizer(k), set(tokenizer(k).get_vocab().values()) - set(decoded_bytes(tokenizer(k))))
        for k in kinds
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_and_itself_share_every_id_with_itself(kind: str):
    own = vocabulary(tokenizer(kind), bos_token=1, eos_token=2)
    padded = vocabulary(tokenizer(kind), padding=7, bos_token=2, eos_token=0)
    assert pairs(own, padded) == pairs(padded, own) == {i: i for i in range(own.size)}


def test_a_leading_blank_is_the_same_in_every_spelling():
    bpe, unigram = tokenizer("byte-level"), tokenizer("unigram")
    found = pairs(vocabulary(bpe), vocabulary(unigram))
    for word in ("the", "a", "and"):
        assert found[bpe.token_to_id(f"Ġ{word}")] == unigram.token_to_id(f"▁{word}")
    by_bytes = pairs(vocabulary(bpe), vocabulary(tokenizer("bpe")))
    assert by_bytes[bpe.token_to_id("Ċ")] == tokenizer("bpe").token_to_id("<0x0A>")


def test_a_letter_is_itself_rather_than_its_byte_for_emergencies():
    own, target = tokenizer("bpe"), tokenizer("byte-level")
    assert own.token_to_id("<0x65>") < own.token_to_id("e")
    assert pairs(vocabulary(target), vocabulary(own))[target.token_to_id("e")] == own.token_to_id(
        "e"
    )


def test_of_tokens_with_the_same_text_the_lowest_ids_are_paired():
    target = Tokenizer(WordPiece({"?": 0, "a": 1, "##b": 2}, unk_token="?"))
    drafter = Tokenizer.from_str(tokenizer("byte-level").to_str())
    drafter.add_tokens([AddedToken("  "), AddedToken("ab")])
    double = drafter.token_to_id("  ")
    twice = Tokenizer.from_str(drafter.to_str())
    letter = drafter.token_to_id("b")
    assert pairs(vocabulary(target), vocabulary(drafter)) == {
        1: drafter.token_to_id("Ġa"),
        2: letter,
    }
    spelled = twice.token_to_id("ĠĠ")
    assert spelled is not None
    assert spelled < double
    found = pairs(vocabulary(tokenizer("byte-level")), vocabulary(drafter))
    assert found[tokenizer("byte-level").token_to_id("ĠĠ")] == spelled
    assert pairs(vocabulary(drafter), vocabulary(twice))[double] == double


def test_special_tokens_are_shared_by_name_only_if_both_are_special():
    target, drafter = words("?", "x", "<s>", "<end>"), words("?", "<end>", "<s>", "y")
    target.add_special_tokens(["<s>", "<end>"])
    drafter.add_special_tokens(["<s>"])
    assert pairs(vocabulary(target), vocabulary(drafter)) == {0: 0, 2: 2}


def test_special_tokens_without_a_namesake_are_shared_by_their_role():
    target, drafter = words("?", "<s>", "<end>", "<pad>"), words("<eos>", "<s>", "<bos>", "?")
    target.add_special_tokens(["<s>", "<end>", "<pad>"])
    drafter.add_special_tokens(["<eos>", "<s>", "<bos>"])
    roles = {"bos_token": 1, "eos_token": 2, "pad_token": 3}
    found = pairs(
        vocabulary(target, **roles),
        vocabulary(drafter, bos_token=2, eos_token=0, pad_token=0),
    )
    assert found == {0: 3, 1: 1, 2: 0}  # <s> by name; the drafter's padding is its end already


def test_ids_past_the_network_are_nobodys():
    own = tokenizer("byte-level")
    cut = Vocabulary(own, 300, {})
    assert pairs(vocabulary(own), cut) == {i: i for i in range(300)}
    assert pairs(cut, vocabulary(own)) == {i: i for i in range(300)}


def test_what_is_not_shared_is_read_as_the_drafters_own_last_token_of_it():
    target, drafter = tokenizer("byte-level-larger"), tokenizer("bpe")
    found = map_vocabularies(vocabulary(target, padding=3), vocabulary(drafter))
    is_shared_V = found.is_shared_V.tolist()
    texts, of_byte = decoded_bytes(target), {bytes([b]): b + 3 for b in range(256)}
    assert drafter.id_to_token(of_byte[b"\n"]) == byte_pieces()[10]
    checked = 0
    for number, text in texts.items():
        if is_shared_V[number]:
            continue
        try:
            want = drafter.encode(text.decode(), add_special_tokens=False).ids[-1]
        except UnicodeDecodeError:
            want = of_byte[text[-1:]]
        assert found.target_to_draft_V[number] == want
        checked += 1
    assert checked > 50
    assert found.target_to_draft_V[-3:].tolist() == [drafter.token_to_id("<unk>")] * 3
    assert not any(is_shared_V[-3:])


def test_the_overlap_is_counted_in_tokens_of_each_vocabulary():
    target, drafter = words("a", "b", "c", "d"), words("d", "x", "a", "y", "z")
    found = map_vocabularies(vocabulary(target, padding=4), vocabulary(drafter, padding=1))
    assert (found.num_shared, found.target_share, found.draft_share) == (2, 2 / 4, 2 / 5)
    assert str(found) == "2 of 4 ids (50.0%) of the target's vocabulary, 40.0% of its own"
