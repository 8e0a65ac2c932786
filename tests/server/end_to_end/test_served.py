"""The whole server over HTTP, with the official client, against the offline engine."""

import asyncio
import json
import random

import httpx
import openai
import pytest

from outdraft import LLM, SamplingParams, assets
from tests.server.served import Server, serving, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("end_to_end"),
]

MODEL = "outdraft"
# The same tokens whatever was drafted, so that samples can be compared too.
SPECULATION = {
    "method": "combined",
    "model": str(assets.drafter_path()),
    "rejection_sample_method": "drafter_invariant",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    options = ["--dtype", "float32", "--kv-cache-memory", "256Mi", "--max-num-seqs", "32"]
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *options, "--speculative-config", json.dumps(SPECULATION)) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(
        str(assets.target_path()),
        speculative_config=SPECULATION,
        dtype="float32",
        kv_cache_memory_bytes=256 << 20,
    )


@pytest.fixture
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def is_idle(server: Server) -> bool:
    values = server.metrics()
    return values["num_requests_running"] == values["kv_cache_usage_perc"] == 0


def params_of(number: int) -> dict:
    """Greedy and sampled requests of several lengths, some with stop strings or two sequences."""
    params = {"max_tokens": 8 + 5 * (number % 7), "temperature": (0.0, 0.8)[number % 2]}
    params["seed"] = number
    if number % 5 == 0:
        params["stop"] = ["\n\n"]
    if number % 11 == 0:
        params["n"] = 2
    return params


def test_two_hundred_streams_at_once_equal_the_offline_engine(server: Server, offline: LLM):
    texts = [text for _, text in assets.prompts()]
    jobs = [(texts[i % len(texts)][-60 - i :], params_of(i)) for i in range(200)]

    async def complete(client: openai.AsyncOpenAI, prompt: str, params: dict) -> list[str]:
        written = [""] * params.get("n", 1)
        stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **params)
        async for chunk in stream:
            for choice in chunk.choices:
                written[choice.index] += choice.text
        return written

    async def all_at_once() -> list[list[str]]:
        limits = httpx.Limits(max_connections=200)
        async with (
            httpx.AsyncClient(limits=limits, timeout=300) as http,
            openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
            ) as client,
        ):
            return await asyncio.gather(*(complete(client, *job) for job in jobs))

    got = asyncio.run(all_at_once())
    outputs = offline.generate(
        [prompt for prompt, _ in jobs],
        [SamplingParams(**params) for _, params in jobs],
        use_tqdm=False,
    )
    for written, output in zip(got, outputs, strict=True):
        assert written == [completion.text for completion in output.outputs]
    wait_for(lambda: is_idle(server))


def test_clients_that_hang_up_leave_nothing_behind(server: Server):
    rng = random.Random(1)
    prompt = assets.prompts()[0][1]

    async def leave_early(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": True, "n": 2}
        after_s = rng.uniform(0.0, 0.6)
        try:
            async with asyncio.timeout(after_s):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async def all_at_once() -> None:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(leave_early(client) for _ in range(60)))

    asyncio.run(all_at_once())
    wait_for(lambda: is_idle(server), seconds=20)


def test_a_prediction_is_counted_and_changes_nothing(server: Server, client: openai.OpenAI):
    prompt = assets.prompts()[2][1]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    plain = client.chat.completions.create(
        max_tokens=100, extra_body={"speculation": {"enabled": False}}, **asked
    )
    text = plain.choices[0].message.content
    assert text
    predicted = client.chat.completions.create(
        max_tokens=100, prediction={"type": "content", "content": text}, **asked
    )
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 50
    half = text[: len(text) // 2] + " never this" * 30  # one that is wrong at once may not be tried
    wrong = client.chat.completions.create(
        max_tokens=100, prediction={"type": "content", "content": half}, **asked
    )
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_equal_seeded_requests_get_one_text_which_is_that_of_plain_decoding(server: Server):
    asked = {"model": MODEL, "prompt": "def parse(", "temperature": 1, "max_tokens": 60, "seed": 7}

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            bodies = [asked] * 4 + [asked | {"seed": None}] * 2
            answers = await asyncio.gather(*(client.completions.create(**body) for body in bodies))
            plain = {"speculation": {"enabled": False}}
            answers.append(await client.completions.create(**asked, extra_body=plain))
            return [answer.choices[0].text for answer in answers]

    *seeded, first, second, plain = asyncio.run(several())
    assert seeded == [plain] * 4
    assert len({first, second, plain}) == 3


def test_an_output_follows_its_schema(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "config = "}],
            temperature=temperature,
            seed=3,
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "thing", "schema": schema},
            },
        )
        if answer.choices[0].finish_reason == "length":
            continue  # an integer may go on for ever
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"name", "size"}
        assert isinstance(value["size"], int)


def test_log_probabilities_and_metrics_of_a_request(client: openai.OpenAI, offline: LLM):
    prompt = "import os\n\n\ndef main("
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=12,
        temperature=0,
        logprobs=2,
        extra_body={"include_metrics": True},
    )
    [output] = offline.generate(
        [prompt], SamplingParams(max_tokens=12, temperature=0, logprobs=2), use_tqdm=False
    )
    completion = output.outputs[0]
    assert answer.choices[0].text == completion.text
    own = [
        entry[token].logprob
        for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(own, abs=1e-4)
    spoken = answer.model_extra["metrics"]["speculative_decoding"]
    assert spoken["num_draft_tokens"] >= spoken["num_accepted_draft_tokens"]


def test_the_rates_on_the_metrics_page_add_up(server: Server, client: openai.OpenAI):
    before = server.metrics()
    answer = client.completions.create(
        model=MODEL, prompt="def f(", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    wait_for(lambda: is_idle(server))
    wait_for(
        lambda: (
            server.metrics()["generation_tokens_total"] >= before["generation_tokens_total"] + 40
        )
    )
    gained = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert gained["generation_tokens_total"] == answer.usage.completion_tokens == 40
    assert gained["prompt_tokens_total"] == answer.usage.prompt_tokens
    accepted = gained["spec_decode_num_accepted_tokens_total"]
    by_source = [
        value
        for name, value in gained.items()
        if name.startswith("spec_decode_accepted_tokens_by_source_total")
    ]
    assert accepted == sum(by_source)
