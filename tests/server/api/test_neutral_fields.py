"""Fields of OpenAI's and vLLM's are supported, neutral for some values, or refused by name."""

import openai
import pytest
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from outdraft.server.api.bodies import ChatRequest, CompletionRequest, ResponsesRequest
from tests.server.api.fake_engine import FakeEngine, with_script
from tests.server.api.serving import MODEL, serve

HELLO = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "hi"},
}

# What vLLM has beside OpenAI's fields, with the values that clients send for nothing.
EVERYWHERE = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "watermarking": False,
    "logits_processors": [],
    "thinking_token_budget": -1,
    "mm_processor_kwargs": {},
    "kv_transfer_params": {},
    "ec_transfer_params": {},
    "vllm_xargs": {},
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_prompt_text": False,
    "guided_decoding_backend": "auto",
    "session_id": "mine",
    "stream_interval": 1,
    "return_mm_kwargs": True,
    "spaces_between_special_tokens": True,
    "verbosity": "low",
}
CHOICES = {
    "best_of": 1,
    "n": 1,
    "truncation_side": "left",
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "stream_options": {"include_usage": False, "include_obfuscation": True},
    "response_format": {"type": "text"},
    "structured_outputs": None,
}
NEUTRAL = {
    "/v1/chat/completions": EVERYWHERE
    | CHOICES
    | {
        "echo": False,
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "tools": [],
        "tool_choice": "none",
        "media_io_kwargs": {},
        "documents": [],
        "top_logprobs": 0,
        "logprobs": False,
        "include_reasoning": True,
        "continue_final_message": False,
    },
    "/v1/completions": EVERYWHERE | CHOICES | {"suffix": "", "echo": False},
    "/v1/responses": EVERYWHERE
    | {
        "background": False,
        "truncation": "disabled",
        "tools": [],
        "tool_choice": "auto",
        "max_tool_calls": 3,
        "context_management": [],
        "enable_response_messages": False,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "reasoning": {"context": "auto", "mode": "standard", "generate_summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "high"},
    },
}


@pytest.mark.parametrize("path", PATHS)
def test_values_that_change_nothing_are_accepted(served, path):
    plain = served.post(path, json=PATHS[path])
    reply = served.post(path, json=PATHS[path] | NEUTRAL[path])
    assert reply.status_code == 200, reply.text
    (prompt, params, _), (same_prompt, same_params, _) = served.engine.requests[-2:]
    assert params == same_params
    assert prompt.text == same_prompt.text
    told = [one.json().get("choices", one.json().get("output")) for one in (plain, reply)]
    for items in told:
        for item in items:
            item.pop("id", None)
    assert told[0] == told[1]


OTHER = {
    "use_beam_search": True,
    "length_penalty": 0.9,
    "early_stopping": True,
    "watermarking": True,
    "logits_processors": ["x"],
    "thinking_token_budget": 5,
    "mm_processor_kwargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "routed_experts_prompt_start": False,
    "return_token_offsets": True,
    "return_prompt_text": 0,
    "guided_decoding_backend": "outlines",
}
OTHER_VALUES = [
    *((path, name, value) for path in PATHS for name, value in OTHER.items()),
    *((path, "best_of", 2) for path in list(PATHS)[:2]),
    *((path, "truncation_side", "right") for path in list(PATHS)[:2]),
    ("/v1/chat/completions", "echo", True),
    ("/v1/chat/completions", "functions", [{"name": "f"}]),
    ("/v1/chat/completions", "function_call", {"name": "f"}),
    ("/v1/chat/completions", "modalities", ["text", "audio"]),
    ("/v1/chat/completions", "media_io_kwargs", {"a": 1}),
    ("/v1/completions", "suffix", "x"),
    ("/v1/responses", "background", True),
    ("/v1/responses", "truncation", "auto"),
    ("/v1/responses", "tools", [{"type": "web_search"}]),
    ("/v1/responses", "tool_choice", "required"),
    ("/v1/responses", "context_management", [{"type": "compaction"}]),
]


@pytest.mark.parametrize(("path", "name", "value"), OTHER_VALUES)
def test_other_values_are_refused_by_name(served, path, name, value):
    reply = served.post(path, json=PATHS[path] | {name: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_value")
    assert error["message"].startswith(f"{name}: only ")


def test_as_many_as_n_are_the_best_of_n(served, client):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "n": 3}
    assert len(client.completions.create(**body, best_of=3).choices) == 3
    with pytest.raises(openai.BadRequestError, match="only 3, as n, is supported"):
        client.completions.create(**body, best_of=4)


REFUSED = {
    "/v1/chat/completions": {"audio", "moderation", "web_search_options"},
    "/v1/completions": set(),
    "/v1/responses": {
        *("access_programs", "conversation", "image", "moderation", "previous_response_id"),
        "prompt",
    },
}
VLLMS = {"logprob_token_ids", "repetition_detection"}
REFUSED_ROWS = [
    *((path, name) for path, names in REFUSED.items() for name in sorted(names | VLLMS)),
    ("/v1/chat/completions", "chat_template"),
    ("/v1/completions", "prompt_embeds"),
    ("/v1/responses", "previous_input_messages"),
]


@pytest.mark.parametrize(("path", "name"), REFUSED_ROWS)
def test_what_is_not_supported_is_refused_by_name(served, path, name):
    reply = served.post(path, json=PATHS[path] | {name: {"a": 1}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "theirs", "ours"),
    [
        ("/v1/chat/completions", chats.CompletionCreateParamsBase, ChatRequest),
        ("/v1/completions", texts.CompletionCreateParamsBase, CompletionRequest),
        ("/v1/responses", responses.ResponseCreateParamsBase, ResponsesRequest),
    ],
)
def test_every_field_of_openais_client_is_decided(path, theirs, ours):
    assert set(theirs.__annotations__) - set(ours.model_fields) == REFUSED[path]


@pytest.mark.parametrize("path", PATHS)
def test_a_wish_for_short_answers_is_ignored_with_a_line_in_the_log(served, path, caplog):
    wish = {"text": {"verbosity": "low"}} if path == "/v1/responses" else {"verbosity": "low"}
    assert served.post(path, json=PATHS[path] | wish).status_code == 200
    assert "verbosity is ignored" in caplog.text
    caplog.clear()
    assert served.post(path, json=PATHS[path] | {"verbosity": None}).status_code == 200
    assert caplog.text == ""


MARK = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_marks_of_what_is_worth_keeping_do_not_reach_the_template():
    with serve(with_script("x"), tool_call_parser="hermes") as served:
        for mark in ({}, MARK):
            part = {"type": "text", "text": "hi"} | mark
            tool = TOOL | mark | {"function": TOOL["function"] | mark}
            body = {"messages": [{"role": "user", "content": [part]} | mark], "tools": [tool]}
            assert served.post("/v1/chat/completions", json=body).status_code == 200
            item = {"role": "user", "content": [part | {"type": "input_text"}]}
            assert served.post("/v1/responses", json={"input": [item]}).status_code == 200
        texts = [prompt.text for prompt, _, _ in served.engine.requests]
    assert texts[:2] == texts[2:]


def test_documents_reach_the_template():
    template = "{% for one in documents or [] %}<{{ one.title }}>{% endfor %}hi"
    with serve(FakeEngine(), template) as served:
        body = {"messages": HELLO, "documents": [{"title": "a", "text": "b"}]}
        assert served.post("/v1/chat/completions", json=body).status_code == 200
        assert served.engine.requests[-1][0].text == "<a>hi"


@pytest.mark.parametrize(
    ("body", "special"), [({"prompt": "a"}, True), ({"messages": HELLO}, False)]
)
def test_null_is_the_default_of_special_tokens_where_ids_are_asked_for(served, body, special):
    ids = [
        served.post("/tokenize", json=body | {"add_special_tokens": value}).json()["tokens"]
        for value in (None, special)
    ]
    assert ids[0] == ids[1]
