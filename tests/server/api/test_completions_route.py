"""/v1/completions, asked by OpenAI's own client."""

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from outdraft.core.outputs import Logprob
from outdraft.server.api.reports import CompletionLogprobs, TokenNames
from tests.engine.byte_level import byte_ids, tokenizer, with_start_token
from tests.engine.trained_tokenizers import sentencepiece_bpe
from tests.server.api.fake_engine import TEXT, FakeEngine, fake_inputs, with_script
from tests.server.api.serving import MODEL, serve


def complete(client, **options):
    return client.completions.create(**{"model": MODEL, "prompt": "the cat", **options})


def test_an_answer_stops_after_16_tokens_unless_told_otherwise(served, client):
    answer = complete(client)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert complete(client, max_tokens=100).choices[0].text == f"{TEXT} 0"


def test_a_stream_adds_up_to_the_answer(client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == complete(client).choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == complete(client).usage


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_in_order(client, stream):
    options = {"prompt": ["a", "b c"], "n": 2, "max_tokens": 40, "echo": True}
    if stream:
        texts = ["", "", "", ""]
        for chunk in complete(client, **options, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = [choice.text for choice in complete(client, **options).choices]
    assert texts == [f"{prompt}{TEXT} {index}" for prompt in ("a", "b c") for index in (0, 1)]


def test_prompts_may_be_token_ids(served, client):
    ids = tokenizer().encode("the mat").ids
    one = complete(client, prompt=ids, echo=True, max_tokens=1)
    assert one.choices[0].text == "the matthe"
    several = complete(client, prompt=[ids, [5, 6]], max_tokens=1)
    assert len(several.choices) == 2
    assert several.usage.prompt_tokens == len(ids) + 2


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_completes_the_character_that_its_prompt_only_begins(stream, echo):
    ids = byte_ids("a日b")
    engine = FakeEngine(script=lambda prompt, index: ids[2:])
    with serve(engine) as served:
        options = {"prompt": ids[:2], "echo": echo, "logprobs": 0}
        answer = complete(served.client(), **options, stream=stream)
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == ("a日b" if echo else "日b")
    offsets = [offset for one in choices if one.logprobs for offset in one.logprobs.text_offset]
    assert offsets == ([0, 1, 1, 1, 2] if echo else [0, 0, 1])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_shows_a_character_that_is_only_begun(client, stream):
    answer = complete(client, prompt=byte_ids("a日")[:2], echo=True, max_tokens=0, stream=stream)
    answers = list(answer) if stream else [answer]
    assert "".join(one.choices[0].text for one in answers) == "a\N{REPLACEMENT CHARACTER}"


def test_logprobs_are_parallel_lists(client):
    logprobs = complete(client, logprobs=1, max_tokens=3).choices[0].logprobs
    assert logprobs.tokens == ["the", " cat", " "]
    assert logprobs.text_offset == [0, 3, 7]
    assert logprobs.token_logprobs == [-2.0, -2.0 - 1 / 128, -2.0 - 2 / 128]
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]  # the chosen one is always told
    assert logprobs.top_logprobs[0]["the"] == -2.0


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_say_where_their_tokens_stand_in_the_text(stream, special):
    # Tokens may be parts of a character, and the tokenizer may put one before the prompt.
    prompt, script = "鷲 é!", "né 🦊, 鷲 x"
    texts = with_start_token() if special else tokenizer()
    engine = FakeEngine(fake_inputs(texts), lambda prompt, index: script)
    with serve(engine) as served:
        options = {"prompt": prompt, "max_tokens": 40, "echo": True, "logprobs": 0}
        answer = complete(served.client(), **options, stream=stream)
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    assert text == prompt + script
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for one in logprobs for token in one.tokens]
    offsets = [offset for one in logprobs for offset in one.text_offset]
    assert any(token.startswith("bytes:") for token in tokens)
    pairs = list(zip(tokens, offsets, strict=True))
    if special:
        assert pairs.pop(0) == ("<s>", 0)
    for token, offset in pairs:
        if not token.startswith("bytes:"):
            assert text.startswith(token, offset)
        else:
            assert not text[offset].isascii()


@pytest.mark.parametrize("stream", [False, True])
def test_all_tokens_of_a_prompt_may_be_named_by_their_ids(client, stream):
    options = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    answer = complete(client, **options, extra_body={"return_tokens_as_token_ids": True})
    logprobs = (next(iter(answer)) if stream else answer).choices[0].logprobs
    assert logprobs.tokens == ["token_id:5", "token_id:6", "token_id:7"]
    assert logprobs.top_logprobs == [
        None,
        {"token_id:10": -1.0, "token_id:6": -2.0},
        {"token_id:10": -1.0 - 1 / 128, "token_id:7": -2.0 - 1 / 128},
    ]


PARTS = byte_ids("🦊鷲")


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_no_part_of_a_character_is_taken_for_another(as_ids, echo):
    # The harness that asks this way takes an answer for greedy where each token is the likeliest.
    engine = replace(with_script("🦊鷲x"), likely=PARTS)
    with serve(engine) as served:
        options = {"prompt": "鷲🦊", "echo": echo, "logprobs": 2, "max_tokens": 9}
        extra = {"return_tokens_as_token_ids": as_ids}
        logprobs = complete(served.client(), **options, extra_body=extra).choices[0].logprobs
    rows = [*zip(logprobs.tokens, logprobs.top_logprobs, strict=True)][1 if echo else 0 :]
    assert len(rows) == (6 if echo else 0) + 8
    for token, top in rows:
        assert len(top) == 2  # the chosen one is the second
        assert max(top, key=top.__getitem__) != token
        assert min(top, key=top.__getitem__) == token


def scored(rows: list[tuple[int, ...]], texts: Tokenizer | None = None) -> dict[str, Any]:
    """The lists for rows of ids: the chosen one, then the others by how likely they are."""
    own = texts or tokenizer()
    entries = [
        {i: Logprob(-rank, rank, own.decode([i], False)) for rank, i in enumerate(row, start=1)}
        for row in rows
    ]
    return CompletionLogprobs(5, TokenNames(own), 0).take(entries)


def test_a_part_of_a_character_is_named_by_its_bytes():
    first, second, *_ = byte_ids("🦊")
    found = scored([(first, second), (second,), byte_ids("a")])
    assert found["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "a"]
    assert found["top_logprobs"][0] == {"bytes:\\xf0": -1, "bytes:\\x9f": -2}


def test_tokens_of_the_same_text_do_not_hide_each_other():
    texts = sentencepiece_bpe(500)
    letter, byte = texts.token_to_id("e"), texts.token_to_id("<0x65>")
    blank = texts.token_to_id("▁e")
    for chosen, *others in permutations([letter, byte, blank]):
        found = scored([(chosen, *others)], texts)
        assert found["tokens"] == ["e"]
        named = {f"token_id:{i}": -rank for rank, i in enumerate(others, start=2)}
        assert found["top_logprobs"] == [{"e": -1} | named]
    part = texts.token_to_id("<0xE6>")
    assert scored([(part,)], texts)["tokens"] == ["bytes:\\xe6"]


def test_streamed_logprobs_add_up(client):
    options = {"logprobs": 2, "max_tokens": 40, "echo": True}
    whole = complete(client, **options).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in complete(client, **options, stream=True)]
    chunks = [chunk for chunk in chunks if chunk is not None]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [x for chunk in chunks for x in getattr(chunk, name)] == getattr(whole, name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_an_answer(client, stream):
    options = {"echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    answer = complete(client, **options)
    answers = list(answer) if stream else [answer]
    assert "".join(one.choices[0].text for one in answers) == "the cat"
    assert answers[-1].choices[0].finish_reason == "length"
    logprobs = answers[0].choices[0].logprobs
    assert logprobs.tokens == ["the", " cat"]
    assert logprobs.token_logprobs == [None, -2.0]
    assert logprobs.top_logprobs == [None, {" cat": -2.0}]
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_token_ids_are_told_when_asked(client):
    ids = tokenizer().encode("the cat").ids
    extra = {"return_token_ids": True}
    choice = complete(client, max_tokens=3, extra_body=extra).choices[0]
    assert choice.model_extra["prompt_token_ids"] == ids
    chunks = list(complete(client, max_tokens=3, stream=True, extra_body=extra))
    assert chunks[0].choices[0].model_extra["prompt_token_ids"] == ids
    streamed = [i for c in chunks for i in c.choices[0].model_extra.get("token_ids", [])]
    assert streamed == choice.model_extra["token_ids"]
    assert len(streamed) == 3


def test_a_trace_tells_of_every_token(client):
    extra = {"speculation": {"trace": True}}
    chunks = list(complete(client, stream=True, extra_body=extra, max_tokens=4))
    tokens = [
        t for c in chunks if c.choices for t in c.choices[0].model_extra["outdraft"]["tokens"]
    ]
    assert "".join(token["text"] for token in tokens) == "the cat sat"
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_all_parameters_reach_the_engine(served, client):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "allowed_token_ids": [4, 5],
        "bad_words": ["x"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": 7,
    }
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"9": 1.5},
        seed=11,
        stop=["q"],
        extra_body=extra,
    )
    _, params, priority = served.engine.requests[-1]
    assert priority == extra.pop("priority") == 7
    for name, value in extra.items():
        assert getattr(params, name) == value
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 11)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.logit_bias, params.stop) == ({9: 1.5}, ["q"])


def test_null_means_the_default(served, client):
    fields = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "stream")
    answer = served.post(
        "/v1/completions", json={"prompt": "a"} | dict.fromkeys([*fields, "top_k", "min_tokens"])
    )
    assert answer.status_code == 200
    _, params, _ = served.engine.requests[-1]
    assert (params.temperature, params.n, params.max_tokens) == (1.0, 1, 16)


def test_harmless_extras_are_ignored(served):
    extras = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    extras |= {"parallel_tool_calls": False, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert served.post("/v1/completions", json={"prompt": "a"} | extras).status_code == 200


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"regex": "a", "grammar": "b"}}, "grammar"),
        ({"extra_body": {"regex": ""}}, "regex"),
        (
            {
                "extra_body": {
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}
                }
            },
            "response_format",
        ),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice"),
        ({"extra_body": {"guided_regex": "a", "guided_json": {}}}, "guided_regex"),
        (
            {"extra_body": {"structured_outputs": {"whitespace_pattern": " *"}}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"extra_body": {"speculation": {"metod": "x"}}}, "speculation.metod"),
        ({"extra_body": {"logprobs": 1, "echo": True, "prompt_logprobs": 2}}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, options, field):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert caught.value.param == field


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("extra", "kind", "text"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"grammar": "b"}}, "grammar", "b"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": '{"a":1}'}}, "json_schema", '{"a":1}'),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": "b"}, "grammar", "b"),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
    ],
)
def test_the_form_of_the_output_reaches_the_engine(served, client, extra, kind, text):
    complete(client, extra_body=extra)
    _, params, _ = served.engine.requests[-1]
    assert (params.structured.kind, params.structured.text) == (kind, text)


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    ],
)
def test_json_has_white_space_only_where_it_is_asked_for(served, client, extra):
    complete(client, extra_body=extra)
    assert served.engine.requests[-1][1].structured.disable_any_whitespace
    spaced = {**extra.get("structured_outputs", {}), "disable_any_whitespace": False}
    complete(client, extra_body={**extra, "structured_outputs": spaced})
    assert not served.engine.requests[-1][1].structured.disable_any_whitespace


def test_an_old_name_is_said_to_be_deprecated(client, caplog):
    complete(client, extra_body={"guided_choice": ["a"]})
    assert "guided_choice is deprecated: use structured_outputs.choice" in caplog.text


def test_a_large_schema_is_refused(client):
    schema = {"type": "object", "description": "x" * 70_000}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="65,536 bytes"):
        complete(client, extra_body={"response_format": response_format})


def test_a_plain_text_format_asks_for_nothing(served, client):
    complete(client, extra_body={"response_format": {"type": "text"}})
    assert served.engine.requests[-1][1].structured is None
