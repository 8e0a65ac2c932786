"""What a caller gives is checked before anything runs."""

import re
import sys
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.core.sampling import MAX_INT64, SamplingParams
from outdraft.engine.inputs import InputProcessor
from tests.engine.byte_level import tokenizer, with_start_token

VOCAB_SIZE = 300


def inputs(texts="default", max_model_len: int = 8, seed: int = 0) -> InputProcessor:
    return InputProcessor(
        tokenizer() if texts == "default" else texts,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=[1],
        seed=seed,
    )


def ids_of(prompt, ours: InputProcessor | None = None, **options) -> list[int]:
    return (ours or inputs()).encoded(prompt, **options).token_ids.tolist()


def test_text_becomes_ids_with_the_tokenizers_own_special_tokens():
    assert ids_of("the cat") == tokenizer().encode("the cat").ids
    assert ids_of("the", inputs(with_start_token()))[0] == 0


def test_a_rendered_conversation_brings_its_own_special_tokens():
    ours = inputs(with_start_token())
    assert ours.encode("the", add_special_tokens=False) == tokenizer().encode("the").ids


def test_ids_are_taken_as_they_are():
    for ids in ((0, VOCAB_SIZE - 1), np.array([0, VOCAB_SIZE - 1])):
        assert ids_of(ids, inputs(None)) == [0, VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ([1] * 8, "maximum context length is 8 tokens. However, the prompt has 8 tokens"),
        ([1, VOCAB_SIZE], f"holds {VOCAB_SIZE}"),
        ([-1], "holds -1"),
        ([1.0], "holds 1.0"),
        ([True], "holds True"),
        (["a"], "holds 'a'"),
        (None, "a text, token ids, or a dict"),
        ({1, 2}, "got set"),
        ({}, "neither"),
        ({"prompt": None}, "neither"),
        ({"promt": "the"}, "did you mean 'prompt'"),
        ({"prompt": "the", "multi_modal_data": {"image": 1}}, "'multi_modal_data'"),
        ({"prompt": ["the"]}, "must be a text"),
        ({"prompt_token_ids": "the"}, "must be a list"),
        ({"prompt_token_ids": 5}, "must be a list"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, f"holds {VOCAB_SIZE}"),
        ({"prompt_token_ids": []}, "at least one token"),
        ("a\ud800", "Unicode"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt, message):
    with pytest.raises(RequestError, match=message) as caught:
        inputs().encoded(prompt)
    assert caught.value.field == "prompt"


def test_the_longest_prompt_leaves_room_for_one_token():
    assert len(ids_of([1] * 7)) == 7


def test_a_prompt_may_be_a_dict_as_in_vllm():
    ours = inputs(with_start_token())
    assert ids_of({"prompt": "the cat"}, ours) == ids_of("the cat", ours)
    assert ids_of({"prompt_token_ids": (5, 6)}, ours) == [5, 6]
    assert ids_of({"prompt_token_ids": np.array([5, 6]), "prompt": None}, ours) == [5, 6]
    both = ours.encoded({"prompt_token_ids": [5, 6], "prompt": "the cat", "cache_salt": "s"})
    assert (both.text, both.token_ids.tolist(), both.cache_salt) == ("the cat", [5, 6], "s")


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_a_salt_is_a_text(salt):
    with pytest.raises(RequestError, match="cache_salt") as caught:
        inputs().encoded({"prompt": "the", "cache_salt": salt})
    assert caught.value.field == "cache_salt"


def test_special_tokens_can_be_left_out():
    ours = inputs(with_start_token())
    assert ids_of("the", ours, add_special_tokens=False) == tokenizer().encode("the").ids


def test_a_long_prompt_can_be_cut_to_its_end_and_keeps_its_special_tokens():
    text = "the cat sat on the mat"
    plain, ours = tokenizer().encode(text).ids, inputs(with_start_token(), max_model_len=99)
    assert ids_of(text, ours, keep_last=4) == [0, *plain[-3:]]
    assert ids_of(text, ours, keep_last=4, add_special_tokens=False) == plain[-4:]
    assert ids_of(text, ours, keep_last=50) == [0, *plain]
    assert ids_of(text, ours, keep_last=1) == [0]
    assert ids_of([5, 6, 7], ours, keep_last=2) == [6, 7]


def test_text_needs_a_tokenizer():
    with pytest.raises(RequestError, match="without a tokenizer"):
        inputs(None).encoded("a")
    for name in ("stop", "bad_words"):
        with pytest.raises(RequestError) as caught:
            inputs(None).check_params(SamplingParams(**{name: ["a"]}))
        assert caught.value.field == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_parameters_name_only_tokens_that_exist(name, token_id):
    inputs().check_params(SamplingParams(**{name: [0, VOCAB_SIZE - 1]}))
    with pytest.raises(RequestError) as caught:
        inputs().check_params(SamplingParams(**{name: [token_id]}))
    assert caught.value.field == name


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, "5"])
def test_logit_bias_names_only_tokens_that_exist(token_id):
    inputs().check_params(SamplingParams(logit_bias={5: 1.0}))
    with pytest.raises(RequestError) as caught:
        inputs().check_params(SamplingParams(logit_bias={token_id: 1.0}))
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_logprobs_than_tokens_exist(name):
    small = InputProcessor(None, vocab_size=5, max_model_len=9, eos_token_ids=[], seed=0)
    small.check_params(SamplingParams(**{name: 5}))
    with pytest.raises(RequestError, match="at most 5") as caught:
        small.check_params(SamplingParams(**{name: 6}))
    assert caught.value.field == name


def test_stop_tokens_are_the_models_own_and_those_asked_for():
    ours = inputs()
    assert ours.stop_token_ids(SamplingParams()) == {1}
    assert ours.stop_token_ids(SamplingParams(stop_token_ids=[7])) == {1, 7}
    assert ours.stop_token_ids(SamplingParams(stop_token_ids=[7], ignore_eos=True)) == {7}


def test_a_bad_word_is_banned_however_the_text_before_it_ends():
    words = inputs().bad_words_ids(SamplingParams(bad_words=["the", "cat"]))
    for text in ("the", " the", "cat", " cat"):
        ids = tuple(tokenizer().encode(text).ids)
        assert any(ids[-len(word) :] == word for word in words), text


def test_no_bad_word_is_listed_that_another_one_covers():
    [zebra] = inputs().bad_words_ids(SamplingParams(bad_words=[" zebra"]))
    assert zebra == tuple(tokenizer().encode("zebra").ids)


@pytest.mark.parametrize("word", ["", " ", "\n"])
def test_a_bad_word_of_blanks_is_refused(word):
    with pytest.raises(RequestError, match=f"blanks alone, got {re.escape(repr(word))}") as caught:
        inputs().bad_words_ids(SamplingParams(bad_words=[word]))
    assert caught.value.field == "bad_words"


def test_a_seed_means_the_same_in_any_company():
    params = SamplingParams(seed=5, n=3)
    keys = [inputs(seed=1).seed(params, 7, index) for index in range(3)]
    assert keys == [inputs(seed=2).seed(params, 99, index) for index in range(3)]
    assert keys[0] == 5
    assert len(set(keys)) == 3


def test_keys_of_negative_seeds_are_not_negative_and_differ():
    seeds = (-(2**63), -3, -2, 3)
    keys = [inputs().seed(SamplingParams(seed=seed), 7, 0) for seed in seeds]
    assert keys == [inputs(seed=2).seed(SamplingParams(seed=seed), 9, 0) for seed in seeds]
    assert min(keys) >= 0
    assert len(set(keys)) == len(seeds)


def test_without_a_seed_every_sequence_has_its_own_key():
    params = SamplingParams()
    keys = {
        inputs(seed=engine).seed(params, number, index)
        for engine in range(3)
        for number in range(20)
        for index in range(3)
    }
    assert len(keys) == 180
    assert all(0 <= key <= MAX_INT64 for key in keys)
    assert inputs(seed=1).seed(params, 4, 2) == inputs(seed=1).seed(params, 4, 2)


@pytest.fixture
def no_forced_switches():
    """Threads change places only where one of them gives up the interpreter's lock."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("no_forced_switches")
def test_encoding_a_long_text_does_not_hold_up_other_threads():
    # `Tokenizer.encode` keeps the interpreter's lock for as long as it takes.
    text, ours = "the cat sat on the mat " * 20_000, inputs(max_model_len=2**20)
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    most = 0
    for _ in range(20):  # a thread may find no free core for a while
        before = ticks
        ours.encode(text)
        most = max(most, ticks - before)
        if most > 3:
            break
    done.set()
    ticking.join()
    assert most > 3


@pytest.mark.parametrize("prediction", ["the cat sat on the mat " * 10, [2] * 100])
def test_a_prediction_is_no_longer_than_an_output_can_be(prediction):
    ids = inputs(max_model_len=8).prediction_ids(SamplingParams(prediction=prediction))
    assert len(ids) == 8


def of_a_smaller_network() -> InputProcessor:
    """Its tokenizer knows a token more, as those of models that also read images do."""
    texts = Tokenizer.from_str(tokenizer().to_str())
    texts.add_special_tokens(["<image>"])
    unknown = texts.token_to_id("<image>")
    assert unknown is not None
    return InputProcessor(
        texts, vocab_size=unknown, max_model_len=64, eos_token_ids=[1, unknown], seed=0
    )


def test_tokens_that_the_network_does_not_have_reach_no_step():
    ours = of_a_smaller_network()
    for field, give in (
        ("prompt", ours.encoded),
        ("prediction", lambda text: ours.prediction_ids(SamplingParams(prediction=text))),
    ):
        with pytest.raises(RequestError, match=f"{field} has '<image>', a token") as caught:
            give("the cat<image>")
        assert caught.value.field == field
    assert ours.stop_token_ids(SamplingParams()) == {1}
    words = ours.bad_words_ids(SamplingParams(bad_words=["<image>", "cat"]))
    assert words == inputs().bad_words_ids(SamplingParams(bad_words=["cat"]))
