"""Thoughts come apart from answers, whole and streamed, asked by OpenAI's own client."""

from dataclasses import replace
from itertools import pairwise

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outdraft.core.errors import ConfigError
from outdraft.core.structured_outputs import StructuredOutput, Thoughts
from outdraft.server.api.calls import MARKS, whole_calls
from outdraft.server.api.reasoning import AnswerParser, Stage, check_marks, stage_after
from tests.engine.byte_level import tokenizer
from tests.server.api.fake_engine import FakeEngine
from tests.server.api.serving import MODEL, serve

HELLO = [{"role": "user", "content": "what is <think> for?"}]
TEMPLATE = (  # as Qwen3's, which thinks by itself or is given empty thoughts
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opens_thoughts %}<think>\n{% endif %}{% endif %}"
)
THOUGHT, ANSWER = "the user asks < me >\n\nlet me see", "the cat\nsat."
OUTPUT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def served():
    engine = replace(FakeEngine(), script=lambda _prompt, _index: OUTPUT)
    with serve(engine, TEMPLATE, reasoning_parser="qwen3", tool_call_parser="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def chat(client, text: str, served, *, messages=HELLO, **options):
    served.engine.script = lambda _prompt, _index: text
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def streamed(chunks) -> tuple[str, str, list]:
    """Thoughts, text and calls of a stream; thoughts come first, under both names."""
    thoughts, text, calls = "", "", []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        new = getattr(delta, "reasoning", None) or ""
        assert new == (getattr(delta, "reasoning_content", None) or "")
        assert not (new and text)
        thoughts, text = thoughts + new, text + (delta.content or "")
        calls += [call.function.name for call in delta.tool_calls or [] if call.function.name]
    return thoughts, text, calls


def test_thoughts_have_a_field_and_an_older_alias(client, served):
    [choice] = chat(client, OUTPUT, served).choices
    assert choice.message.content == ANSWER
    assert choice.message.reasoning == choice.message.reasoning_content == THOUGHT
    assert choice.finish_reason == "stop"


def test_a_stream_adds_up_to_the_same(client, served):
    assert streamed(chat(client, OUTPUT, served, stream=True)) == (THOUGHT, ANSWER, [])


def test_an_answer_without_thoughts_has_none(client, served):
    [choice] = chat(client, ANSWER, served).choices
    assert (choice.message.content, choice.message.reasoning) == (ANSWER, None)
    assert streamed(chat(client, ANSWER, served, stream=True)) == ("", ANSWER, [])


def test_a_request_can_leave_the_thoughts_out(client, served):
    without = {"extra_body": {"include_reasoning": False}}
    [choice] = chat(client, OUTPUT, served, **without).choices
    assert (choice.message.content, choice.message.reasoning) == (ANSWER, None)
    assert streamed(chat(client, OUTPUT, served, stream=True, **without)) == ("", ANSWER, [])
    told = {"extra_body": {"include_reasoning": True}}
    assert streamed(chat(client, OUTPUT, served, stream=True, **told)) == (THOUGHT, ANSWER, [])


def test_thoughts_that_are_cut_short_are_no_answer(client, served):
    for extra in ({}, {"extra_body": {"chat_template_kwargs": {"opens_thoughts": True}}}):
        text = "<think>\nhm" if not extra else "hm"
        [choice] = chat(client, text, served, **extra).choices
        assert (choice.message.content, choice.message.reasoning) == (None, "hm")


def test_the_template_may_begin_the_thoughts_or_end_them(client, served):
    def asked(text: str, **kwargs):
        extra = {"extra_body": {"chat_template_kwargs": kwargs}}
        [choice] = chat(client, text, served, **extra).choices
        both = streamed(chat(client, text, served, stream=True, **extra))
        assert both == (choice.message.reasoning or "", choice.message.content or "", [])
        return both[:2]

    rest = OUTPUT.removeprefix("<think>\n")
    assert asked(rest, opens_thoughts=True) == (THOUGHT, ANSWER)
    assert asked("so </think> it is", enable_thinking=False) == ("", "so </think> it is")


def test_calls_are_read_from_the_answer_alone(client, served):
    text = f"<think>{CALL}?</think>\n\nI ask. {CALL}"
    [choice] = chat(client, text, served, tools=[TOOL]).choices
    assert choice.message.reasoning == f"{CALL}?"
    assert choice.message.content == "I ask."
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]
    assert choice.finish_reason == "tool_calls"
    assert streamed(chat(client, text, served, tools=[TOOL], stream=True)) == (
        f"{CALL}?",
        "I ask.",
        ["f"],
    )


def form_of(served) -> StructuredOutput | None:
    return served.engine.requests[-1][1].structured


def test_a_form_binds_the_answer_alone(client, served):
    def asked(**kwargs) -> Thoughts | None:
        extra = {"structured_outputs": {"regex": "a+"}, "chat_template_kwargs": kwargs}
        chat(client, OUTPUT, served, extra_body=extra)
        form = form_of(served)
        assert (form.kind, form.text) == ("regex", "a+")
        return form.behind

    assert asked() == Thoughts("</think>", start="<think>")
    assert asked(opens_thoughts=True) == Thoughts("</think>")
    assert asked(enable_thinking=False) is None


def test_a_forced_call_comes_behind_the_thoughts(client, served):
    text = '<think>hm</think>{"name": "f", "arguments": {}}'
    [choice] = chat(client, text, served, tools=[TOOL], tool_choice="required").choices
    assert form_of(served).behind == Thoughts("</think>", start="<think>")
    assert choice.message.reasoning == "hm"
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]


def test_a_forced_call_that_thoughts_leave_no_room_for_is_none(client, served):
    [choice] = chat(client, "<think>hm", served, tools=[TOOL], tool_choice="required").choices
    assert choice.message.reasoning == "hm"
    assert (choice.message.content, choice.message.tool_calls) == (None, None)


def respond(client, script: str, served, **options):
    served.engine.script = lambda _prompt, _index: script
    return client.responses.create(model=MODEL, input="hi", **options)


def test_a_response_has_the_thoughts_as_an_item_of_their_own(client, served):
    response = respond(client, OUTPUT, served)
    thoughts, message = response.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", THOUGHT)
    assert (message.type, response.output_text) == ("message", ANSWER)
    assert [item.type for item in respond(client, ANSWER, served).output] == ["message"]


def test_a_response_with_thoughts_can_be_sent_back(client, served):
    """The thoughts go with the message behind them, where the template may look for them."""
    first = respond(client, OUTPUT, served)
    turns = [*(item.model_dump() for item in first.output), {"role": "user", "content": "c"}]
    again = client.responses.create(model=MODEL, input=[*turns, turns[0]])
    assert again.status == "completed"
    prompt, _, _ = served.engine.requests[-1]
    text = served.engine.inputs.tokenizer.decode(prompt.token_ids.tolist())
    assert text == f"<assistant>({THOUGHT}){ANSWER}<user>c<assistant>\n"


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [(OUTPUT, THOUGHT, ANSWER), (ANSWER, "", ANSWER), ("<think>hm", "hm", "")],
)
def test_the_events_of_a_response_tell_thoughts_first(client, served, text, thought, answer):
    events = list(respond(client, text, served, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response

    def joined_deltas(kind: str) -> str:
        return "".join(event.delta for event in events if event.type == kind)

    assert joined_deltas("response.reasoning_text.delta") == thought
    assert joined_deltas("response.output_text.delta") == answer == last.output_text
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    kinds = ["reasoning", "message"] if thought else ["message"]
    assert [event.item.type for event in added] == kinds
    assert [event.output_index for event in added] == list(range(len(kinds)))
    assert [event.item for event in done] == last.output
    with client.responses.stream(model=MODEL, input="hi") as stream:
        assert stream.get_final_response().output_text == answer


def test_a_form_of_a_response_binds_the_answer_alone(client, served):
    respond(client, OUTPUT, served, text={"format": {"type": "json_object"}})
    assert form_of(served).behind == Thoughts("</think>", start="<think>")
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, OUTPUT, served, include=["message.output_text.logprobs"])
    assert caught.value.param == "include"


def test_a_server_without_a_parser_leaves_thoughts_in_the_text():
    engine = replace(FakeEngine(), script=lambda _prompt, _index: OUTPUT)
    with serve(engine, TEMPLATE) as served:
        extra = {"structured_outputs": {"regex": "a+"}}
        [choice] = chat(served.client(), OUTPUT, served, extra_body=extra).choices
        assert choice.message.content == OUTPUT
        assert not hasattr(choice.message, "reasoning")
        assert form_of(served).behind is None


def test_deepseek_r1_thinks_although_neither_side_says_so():
    with serve(FakeEngine(), TEMPLATE, reasoning_parser="deepseek_r1") as served:
        client = served.client()
        [choice] = chat(client, f"{THOUGHT}\n</think>\n\n{ANSWER}", served).choices
        assert (choice.message.reasoning, choice.message.content) == (THOUGHT, ANSWER)
        [choice] = chat(client, "still thinking", served).choices
        assert (choice.message.reasoning, choice.message.content) == ("still thinking", None)


@pytest.mark.parametrize(
    ("prompt", "continued", "qwen3", "deepseek_r1"),
    [
        ("<user>a <think><assistant>", None, Stage.UNKNOWN, Stage.THINKING),
        ("<assistant><think>\n", None, Stage.THINKING, Stage.THINKING),
        ("<assistant><think>\n\n</think>\n\n", None, Stage.ANSWERING, Stage.ANSWERING),
        ("<think>hm", "<think>hm", Stage.THINKING, Stage.THINKING),
        ("<think>hm</think>so", "<think>hm</think>so", Stage.ANSWERING, Stage.ANSWERING),
        ("so", "so", Stage.ANSWERING, Stage.ANSWERING),
        ("<assistant>", "", Stage.UNKNOWN, Stage.THINKING),
    ],
)
def test_the_prompts_end_tells_where_the_model_is(prompt, continued, qwen3, deepseek_r1):
    assert stage_after(prompt, continued, "qwen3") is qwen3
    assert stage_after(prompt, continued, "deepseek_r1") is deepseek_r1


@pytest.mark.parametrize("mark", ["<think>", "</think>"])
def test_marks_must_come_as_text(mark):
    check_marks(tokenizer())
    added = Tokenizer.from_str(tokenizer().to_str())
    added.add_tokens([mark])
    check_marks(added)
    special = Tokenizer.from_str(tokenizer().to_str())
    special.add_special_tokens([mark])
    for texts in (special, None):
        with pytest.raises(ConfigError, match="--reasoning-parser"):
            check_marks(texts)


pieces = st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a", CALL, "</th"])


@given(st.lists(pieces, max_size=8).map("".join), st.data(), st.sampled_from(Stage))
def test_however_an_output_is_cut_its_parts_are_the_same(text, data, stage):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    calls = MARKS["hermes"], ()
    whole, cut = AnswerParser(stage, calls), AnswerParser(stage, calls)
    expected = whole.push(text, is_last=True)
    found = [part for a, b in pairwise(places) for part in cut.push(text[a:b], is_last=False)]
    assert joined([*found, *cut.push("", is_last=True)]) == joined(expected)


def joined(parts) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(text for kind, text in parts if kind == "thought"),
        "".join(text for kind, text in parts if kind == "text"),
        whole_calls(parts),
    )
