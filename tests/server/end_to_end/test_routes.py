"""Every route and every kind of option, by the official client, against the real engine."""

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from outdraft import assets
from tests.server.served import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("end_to_end")]

MODEL = "outdraft"
# Drafts come at any cost: what a machine pays for them is no part of the claims here.
SPECULATION = {
    "method": "combined",
    "model": str(assets.drafter_path()),
    "num_speculative_tokens": 3,
    "control": "fixed",
}
ASKED = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("server")
    flags = ["--dtype", "float32", "--api-key", "secret", "--tool-call-parser", "hermes"]
    flags += ["--speculative-config", json.dumps(SPECULATION)]
    with serving(folder, *flags) as running:
        yield running


@pytest.fixture
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as one:
        yield one


OPTIONS = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {"30": 5}},
    "seed": {"seed": 7, "temperature": 1.0, "top_p": 0.9},
    "n": {"n": 2, "temperature": 1.0},
    "stop": {"stop": ["\n", "return"]},
    "vllm": {
        "extra_body": {
            "top_k": 20,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "min_tokens": 3,
            "stop_token_ids": [5],
            "bad_words": ["self"],
            "include_stop_str_in_output": True,
        }
    },
    "allowed": {"extra_body": {"allowed_token_ids": list(range(20, 60)), "ignore_eos": True}},
    "plain": {"extra_body": {"speculation": {"enabled": False}}},
    "fewer": {"extra_body": {"speculation": {"num_speculative_tokens": 2}}},
    "named": {"extra_body": {"speculation": {"method": "suffix"}}},
    "traced": {"extra_body": {"speculation": {"trace": True}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[ab]{4}"}}},
    "grammar": {"extra_body": {"grammar": 'start: "yes" | "no"'}},
    "object": {"response_format": {"type": "json_object"}},
    "predicted": {"prediction": {"type": "content", "content": "\n    return a + b\n"}},
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", OPTIONS)
def test_chat_takes_it_and_a_stream_says_the_same(client: openai.OpenAI, name: str):
    options = {"temperature": 0, "seed": 1, **OPTIONS[name]}
    asked = {"model": MODEL, "messages": ASKED, "max_tokens": 24, **options}
    whole = client.chat.completions.create(**asked)
    texts = [""] * len(whole.choices)
    usage = None
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **asked
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert usage.completion_tokens > 0
    if options["temperature"] == 0:
        assert texts == [choice.message.content for choice in whole.choices]
        assert usage.completion_tokens == whole.usage.completion_tokens
    if name == "regex":
        assert len(texts[0]) == 4
    if name == "grammar":
        assert texts[0] in ("yes", "no")


@pytest.mark.parametrize("name", ["penalties", "n", "stop", "vllm", "plain", "regex", "predicted"])
def test_completions_take_it(client: openai.OpenAI, name: str):
    options = {"temperature": 0, **OPTIONS[name]}
    if "prediction" in options:
        options["extra_body"] = {"prediction": options.pop("prediction")}
    answer = client.completions.create(
        model=MODEL, prompt="def add(a, b):", max_tokens=16, echo=True, logprobs=1, **options
    )
    for choice in answer.choices:
        assert choice.text.startswith("def add(a, b):")
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    assert answer.usage.prompt_tokens > 0


def test_chat_log_probabilities(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    rows = answer.choices[0].logprobs.content
    assert len(rows) == answer.usage.completion_tokens
    assert all(len(row.top_logprobs) == 3 for row in rows)
    assert all(row.logprob <= row.top_logprobs[0].logprob + 1e-6 for row in rows)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_traced_draft_has_the_log_probabilities_of_what_was_emitted_of_it(
    client: openai.OpenAI, logprobs: int | None
):
    stream = client.completions.create(
        model=MODEL,
        prompt="def add(a, b):",
        max_tokens=40,
        temperature=0,
        logprobs=logprobs,
        stream=True,
        extra_body={"speculation": {"trace": True}},
    )
    emitted: list[float] = []
    steps: list[dict[str, Any]] = []
    for chunk in stream:
        for choice in chunk.choices:
            steps += choice.model_extra["outdraft"]["steps"]
            emitted += choice.logprobs.token_logprobs if choice.logprobs else []
    drafted = [token for step in steps for token in step["drafted"]]
    assert drafted
    assert all(("logprob" in token) is (logprobs is not None) for token in drafted)
    if logprobs is None:
        return
    for step in steps:
        own, emitted = emitted[: step["num_emitted"]], emitted[step["num_emitted"] :]
        kept = [step["drafted"][row]["logprob"] for row in step["accepted_rows"]]
        assert own[: len(kept)] == kept[: len(own)]
    assert emitted == []


def test_a_call_that_has_to_be_made_is_made(client: openai.OpenAI):
    parameters = {
        "type": "object",
        "properties": {"left": {"enum": [1, 2]}},
        "required": ["left"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=60,
        temperature=1,
        seed=5,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["left"] in (1, 2)


class Review(BaseModel):
    """What a client of real life asks for; its strings have a greatest length."""

    title: Annotated[str, Field(max_length=12)]
    verdict: Literal["good", "bad"]
    scores: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(max_length=3)]
    author: "Author"


class Author(BaseModel):
    is_known: bool
    name: Annotated[str, Field(max_length=8)] | None


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_parsed_chats_end_in_valid_objects(client: openai.OpenAI, temperature: float):
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        response_format=Review,
        max_tokens=300,
        temperature=temperature,
        n=1 if temperature == 0 else 4,
    )
    for choice in parsed.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Review)


def test_responses(client: openai.OpenAI):
    whole = client.responses.create(
        model=MODEL, input="def add(a, b):", max_output_tokens=20, temperature=0
    )
    written, kinds = "", []
    for event in client.responses.create(
        model=MODEL, input="def add(a, b):", max_output_tokens=20, temperature=0, stream=True
    ):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            written += event.delta
    assert written == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_the_other_routes(server: Server, client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    made = client.post("/../tokenize", cast_to=dict, body={"prompt": "def add("})
    back = client.post("/../detokenize", cast_to=dict, body={"tokens": made["tokens"]})
    assert back["prompt"] == "def add("
    assert server.get("/health").status_code == 200
    assert "version" in server.get("/version").json()
    assert "outdraft:" in server.get("/metrics").text


def test_errors_are_what_the_client_expects(server: Server, client: openai.OpenAI):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASKED, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_body={"speculation": {"method": "eagle"}}
        )
    assert "method of speculation must be one of" in str(caught.value)
