"""Text as it arrives, and stop strings wherever tokens happen to be cut."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outdraft.text.detokenizer import Detokenizer, begun_text
from tests.engine.byte_level import byte_ids, tokenizer
from tests.engine.trained_tokenizers import sentencepiece_bpe

SENTENCEPIECE = sentencepiece_bpe(400)
token_ids = st.lists(st.integers(0, tokenizer().get_vocab_size() - 1), max_size=20)
small_texts = st.text("abé日", max_size=14)
stops = st.lists(st.text("abé日", min_size=1, max_size=3), min_size=1, max_size=3)


def detokenizer(*stop_strings: str, **options) -> Detokenizer:
    return Detokenizer(tokenizer(), stop_strings, **options)


def push_until_stop(ours: Detokenizer, ids: list[int]) -> str | None:
    for token_id in ids:
        stop = ours.push(token_id)
        if stop is not None:
            return stop
    return None


@given(token_ids)
def test_all_tokens_together_give_the_text_of_decoding_them_at_once(ids):
    ours = detokenizer()
    for token_id in ids:
        assert ours.push(token_id) is None
    ours.finish()
    assert ours.text == tokenizer().decode(ids)


@given(token_ids, st.booleans())
def test_special_tokens_are_skipped_only_on_request(ids, skips):
    ours = detokenizer(skip_special_tokens=skips)
    push_until_stop(ours, ids)
    ours.finish()
    assert ours.text == tokenizer().decode(ids, skip_special_tokens=skips)


def test_a_character_waits_for_the_last_of_its_bytes():
    ours = detokenizer()
    texts = []
    for token_id in byte_ids("a日b"):
        ours.push(token_id)
        texts.append(ours.text)
    assert texts == ["a", "a", "a", "a日", "a日b"]


def test_bytes_that_stay_incomplete_become_replacement_characters_at_the_end():
    ours = detokenizer("x")
    push_until_stop(ours, byte_ids("a日")[:3])
    assert ours.text == "a"
    ours.finish()
    assert ours.text.startswith("a")
    assert set(ours.text[1:]) == {"\N{REPLACEMENT CHARACTER}"}


@given(small_texts, stops, st.booleans())
def test_text_ends_before_the_first_stop_string_if_tokens_are_bytes(text, stop_strings, includes):
    """With one byte a token, the stop string that is complete first is found first."""
    ours = detokenizer(*stop_strings, include_stop_string=includes)
    found = push_until_stop(ours, byte_ids(text))
    ours.finish(at_stop_string=found is not None)
    ends = {
        at + len(stop) for stop in stop_strings if (at := text.find(stop)) >= 0
    }  # where each stop string is complete for the first time
    if not ends:
        assert (found, ours.text) == (None, text)
        return
    seen = text[: min(ends)]
    assert found is not None
    assert found in stop_strings
    at = min(seen.find(stop) for stop in stop_strings if stop in seen)
    assert seen.find(found) == at
    assert ours.text == (seen[: at + len(found)] if includes else seen[:at])


@settings(max_examples=200)
@example(["aab"], byte_ids("aaaab"))
@given(stops, token_ids | small_texts.map(byte_ids))
def test_settled_text_is_never_taken_back(stop_strings, ids):
    ours = detokenizer(*stop_strings)
    settled = ""
    found = None
    for token_id in ids:
        found = ours.push(token_id)
        assert ours.settled_text.startswith(settled)
        settled = ours.settled_text
        if found is not None:
            break
    ours.finish(at_stop_string=found is not None)
    assert ours.text.startswith(settled)


@example(["b", "aba"], byte_ids("aba"))
@given(stops, small_texts.map(byte_ids))
def test_nor_when_the_stop_strings_found_do_not_count_yet(stop_strings, ids):
    ours = detokenizer(*stop_strings)
    settled = ""
    for token_id in ids:
        ours.push(token_id)
        assert ours.settled_text.startswith(settled)
        settled = ours.settled_text
    ours.finish()
    assert ours.text == tokenizer().decode(ids)
    assert ours.text.startswith(settled)


@given(st.text("abé日", max_size=8), stops)
def test_what_is_held_back_could_still_become_a_stop_string(text, stop_strings):
    ours = detokenizer(*stop_strings)
    if push_until_stop(ours, byte_ids(text)) is not None:
        return
    held = text[len(ours.settled_text) :]
    assert held == "" or any(stop.startswith(held) for stop in stop_strings)


def test_a_stop_string_is_found_across_the_border_of_two_tokens():
    border = ["the", " cat"]
    ids = [tokenizer().encode(part).ids for part in border]
    ours = detokenizer("e c")
    assert push_until_stop(ours, ids[0]) is None
    assert ours.settled_text == "th"
    assert push_until_stop(ours, ids[1]) == "e c"
    ours.finish(at_stop_string=True)
    assert ours.text == "th"


def test_the_leftmost_of_several_stop_strings_in_one_token_wins():
    [whole] = tokenizer().encode(" the").ids
    ours = detokenizer("he", "th", "e")
    assert ours.push(whole) == "th"
    ours.finish(at_stop_string=True)
    assert ours.text == " "


@pytest.mark.parametrize(("includes", "text"), [(False, "a"), (True, "ab")])
def test_the_stop_string_itself_stays_only_on_request(includes, text):
    ours = detokenizer("b", include_stop_string=includes)
    assert push_until_stop(ours, byte_ids("abc")) == "b"
    ours.finish(at_stop_string=True)
    assert ours.text == text


def test_a_stop_string_that_came_too_early_is_found_again_only_where_it_comes_again():
    ours = detokenizer("b")
    found = [ours.push(token_id) for token_id in byte_ids("abab")]
    assert found == [None, "b", None, "b"]
    ours.finish(at_stop_string=True)
    assert ours.text == "aba"


def test_an_id_that_no_token_has_adds_no_text():
    ours = detokenizer()
    for token_id in (*byte_ids("a"), tokenizer().get_vocab_size() + 5, *byte_ids("b")):
        ours.push(token_id)
    ours.finish()
    assert ours.text == "ab"


def piece_ids(text: bytes) -> list[int]:
    """Ids of SentencePiece's tokens, one a byte."""
    return [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in text]


@pytest.mark.parametrize("of_bytes", [byte_ids, lambda text: piece_ids(text.encode())])
@given(text=st.text("aé日😀", min_size=1, max_size=6), data=st.data())
def test_an_output_goes_on_with_the_character_that_its_prompt_only_begins(of_bytes, text, data):
    """Its text is that of all ids, less that of the prompt."""
    used = tokenizer() if of_bytes is byte_ids else SENTENCEPIECE
    ids = of_bytes(text)
    end = data.draw(st.integers(1, len(ids)))
    ours = Detokenizer(used, (), prompt_ids=ids[:end])
    push_until_stop(ours, ids[end:])
    ours.finish()
    assert begun_text(used, ids[:end]) + ours.text == text


@given(token_ids, token_ids)
def test_the_texts_of_prompt_and_output_are_that_of_all_their_ids(prompt, ids):
    ours = detokenizer(prompt_ids=prompt, skip_special_tokens=False)
    push_until_stop(ours, ids)
    ours.finish()
    whole = tokenizer().decode(prompt + ids, skip_special_tokens=False)
    assert begun_text(tokenizer(), prompt) + ours.text == whole


def test_special_tokens_may_stand_between_the_bytes_of_a_character():
    first, *others = byte_ids("日")
    ours = detokenizer(prompt_ids=[*byte_ids("a"), first, *[1] * 100])
    push_until_stop(ours, others)
    assert ours.text == "日"


def test_a_prompt_of_special_tokens_only_is_the_beginning_of_a_text():
    for prompt, text in (([1, 2], "the"), ([1, *SENTENCEPIECE.encode("a").ids, 2], " the")):
        ours = Detokenizer(SENTENCEPIECE, (), prompt_ids=prompt)
        push_until_stop(ours, SENTENCEPIECE.encode("the").ids)
        assert ours.text == text


@pytest.mark.parametrize(
    ("used", "ids"),
    [
        (tokenizer(), [tokenizer().token_to_id("ÿ")] * 300),
        (SENTENCEPIECE, piece_ids(b"\x80" * 300)),
    ],
)
def test_bytes_that_can_become_no_character_are_replaced_at_once(used, ids):
    ours = Detokenizer(used, ())
    for count, token_id in enumerate(ids, start=1):
        ours.push(token_id)
        assert ours.text == "\N{REPLACEMENT CHARACTER}" * count


def test_a_character_is_not_undone_by_bytes_that_follow_it():
    ours = Detokenizer(SENTENCEPIECE, ())
    texts = []
    for token_id in piece_ids("日".encode() + b"\xe6a"):
        ours.push(token_id)
        texts.append(ours.text)
    assert texts == ["", "", "日", "日", "日\N{REPLACEMENT CHARACTER}a"]


@given(st.lists(st.integers(3 + 256, SENTENCEPIECE.get_vocab_size() - 1), max_size=20))
def test_pieces_of_words_give_the_text_of_decoding_them_at_once(ids):
    ours = Detokenizer(SENTENCEPIECE, ())
    push_until_stop(ours, ids)
    ours.finish()
    assert ours.text == SENTENCEPIECE.decode(ids)


class CountingTokenizer:
    """Counts the ids that it decodes."""

    def __init__(self, used) -> None:
        self._used, self.decoder, self.num_decoded = used, used.decoder, 0

    def id_to_token(self, token_id):
        return self._used.id_to_token(token_id)

    def decode(self, ids, skip_special_tokens):
        self.num_decoded += len(ids)
        return self._used.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("used", [tokenizer(), SENTENCEPIECE])
def test_a_token_costs_the_same_after_any_number_of_tokens_without_text(used):
    special, part = used.token_to_id("</s>"), used.get_vocab().get("ÿ", used.token_to_id("<0xFF>"))
    for token_id in (special, part):
        counting = CountingTokenizer(used)
        ours = Detokenizer(counting, ())
        for _ in range(16_000):
            ours.push(token_id)
        assert counting.num_decoded <= 4 * 16_000
