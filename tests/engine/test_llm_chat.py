"""`LLM.chat` and `LLM.get_tokenizer`, called as vLLM's are."""

import pytest

from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.text.chat import ChatTemplate, TextTokenizer
from tests.engine.byte_level import tokenizer, with_start_token
from tests.oracle.engines import config, engine
from tests.oracle.engines import tokenizer as words

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if tools %}w50 {% endif %}{% if thinks %}w51 {% endif %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)
ASKED = [{"role": "user", "content": "w3 w5"}]
STARTED = [*ASKED, {"role": "assistant", "content": "w7"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine("qwen2", "plain")


def prompts_of(llm: LLM, messages, **options) -> list[list[int]]:
    outputs = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=TEMPLATE, **options)
    return [output.prompt_token_ids for output in outputs]


def test_one_conversation_or_several_are_answered(llm: LLM):
    assert prompts_of(llm, ASKED) == [[3, 5, 9]]
    assert prompts_of(llm, [ASKED, STARTED]) == [[3, 5, 9], [3, 5, 7, 9]]
    [output] = llm.chat(ASKED, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    [same] = llm.generate([[3, 5, 9]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert output.prompt == "w3 w5 w9"


def test_options_reach_the_template(llm: LLM):
    assert prompts_of(llm, ASKED, add_generation_prompt=False) == [[3, 5]]
    assert prompts_of(llm, ASKED, chat_template_kwargs={"thinks": True}) == [[3, 5, 51, 9]]
    tool = {"type": "function", "function": {"name": "f"}}
    assert prompts_of(llm, ASKED, tools=[tool]) == [[3, 5, 50, 9]]
    assert prompts_of(llm, STARTED, continue_final_message=True) == [[3, 5, 7]]


CALLING = (
    "{% for m in messages %}{{ m.content }} {% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {% for name in call.function.arguments %}{{ name }} {% endfor %}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("silent", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"w5": 1, "w6": 2}', {"w5": 1, "w6": 2}])
def test_calls_of_functions_come_as_openai_writes_them(llm: LLM, silent, arguments):
    call = {"type": "function", "id": "c", "function": {"name": "w4", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "w3"},
        {"role": "assistant", "tool_calls": [call], **silent},
        {"role": "tool", "content": "w7", "tool_call_id": "c"},
    ]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=CALLING)
    assert output.prompt_token_ids == [3, 4, 5, 6, 7]


def test_arguments_that_are_no_object_are_written_under_one_key(llm: LLM):
    call = {"type": "function", "function": {"name": "w4", "arguments": "[1]"}}
    source = CALLING.replace("{{ name }}", "w{{ name | length }}")  # of "arguments"
    turn = {"role": "assistant", "content": "w3", "tool_calls": [call]}
    [output] = llm.chat([turn], GREEDY, use_tqdm=False, chat_template=source)
    assert output.prompt_token_ids == [3, 4, 9]


def test_the_template_comes_with_the_tokenizer(tmp_path):
    words().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} w8")
    llm = LLM.from_config(config("qwen2", None, tokenizer=str(tmp_path)))
    [output] = llm.chat(ASKED, GREEDY, use_tqdm=False)
    assert output.prompt == "w3 w5 w8"
    assert llm.get_tokenizer().apply_chat_template(ASKED, tokenize=False) == "w3 w5 w8"


def test_a_content_may_be_parts(llm: LLM):
    parts = [{"type": "text", "text": "w3"}, {"type": "text", "text": "w5"}]
    messages = [{"role": "user", "content": parts}]
    for form in ("auto", "string"):
        assert prompts_of(llm, messages, chat_template_content_format=form) == [[3, 5, 9]]
    with pytest.raises(ConfigError, match="chat_template_content_format"):
        prompts_of(llm, messages, chat_template_content_format="parts")


def test_the_tokenizer_makes_ids_and_texts(llm: LLM):
    texts = llm.get_tokenizer()
    assert texts.encode("w3 w5") == [3, 5]
    assert texts.decode([3, 5]) == "w3 w5"
    assert len(texts) == 61
    with pytest.raises(RequestError, match="no chat template"):
        texts.apply_chat_template(ASKED)


def test_a_tokenizer_with_a_template_writes_conversations():
    texts = TextTokenizer(with_start_token(), ChatTemplate("<s>{{ messages[0].content }}", {}))
    assert texts.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"
    ids = texts.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [0, *tokenizer().encode("hi").ids]
    assert texts.encode("hi") == ids
    assert texts.decode(ids, skip_special_tokens=True) == "hi"
