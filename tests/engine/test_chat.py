"""Chat templates: rendered as a checkpoint's own code would, and in a sandbox."""

import json
from pathlib import Path

import pytest

from outdraft.core.errors import ConfigError, RequestError
from outdraft.text.chat import (
    ChatTemplate,
    as_content_format,
    parsed_arguments,
    with_readable_calls,
)

CHATML = """{{ bos_token }}{% for message in messages %}
    <|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""

HELLO = [{"role": "user", "content": "héllo"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def test_messages_are_written_with_the_special_tokens_and_trimmed_blocks():
    # jinja's trim_blocks and lstrip_blocks, as the templates of checkpoints expect
    assert template(CHATML).render(HELLO) == "<s>    <|user|>héllo</s>\n<|assistant|>"
    assert template(CHATML).render(HELLO, add_generation_prompt=False).endswith("</s>\n")


def test_transformers_renders_the_same():
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source = CHATML + "{% if tools is not none %}tools{% endif %}{{ messages | tojson(indent=2) }}"
    [expected], _ = chat.render_jinja_template(
        [HELLO], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert template(source).render(HELLO) == expected


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d"])
def test_a_template_may_tell_the_date(form):
    # gpt-oss, Mistral Small 3 and Llama 3.2 do
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source = f"{{{{ strftime_now('{form}') }}}} {{{{ messages[0].content }}}}"
    [before], _ = chat.render_jinja_template([HELLO], chat_template=source)
    ours = template(source).render(HELLO)
    [behind], _ = chat.render_jinja_template([HELLO], chat_template=source)
    assert ours in (before, behind)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{% generation %}\n{{ m.content }}\n{% endgeneration %}\n>"
        "{% endfor %}",
        "{% set x = 1 %}{%- generation -%} {% set x = 2 %}{{ x }} {%- endgeneration -%} {{ x }}",
    ],
)
def test_what_is_marked_as_generated_is_written_as_it_is(source):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    [expected], _ = chat.render_jinja_template([HELLO], chat_template=source)
    assert template(source).render(HELLO) == expected


@pytest.mark.parametrize("options", ["separators=(',', ':')", "sort_keys=true", "true, 1"])
def test_json_is_written_as_the_template_asks(options):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source = f"{{{{ messages | tojson({options}) }}}}"
    [expected], _ = chat.render_jinja_template([HELLO], chat_template=source)
    assert template(source).render(HELLO) == expected


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_have_the_names_that_templates_read(name):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}/{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "a", name: "hm"}]
    [expected], _ = chat.render_jinja_template([messages], chat_template=source)
    assert template(source).render(messages) == expected == "|/hm|hm/"


@pytest.mark.parametrize("written", ["+ call.function.arguments", "~ call.function.arguments.a"])
def test_arguments_of_a_call_have_the_form_that_the_template_writes(written):
    # DeepSeek V3.1's takes JSON, GLM's and Qwen's take an object
    source = "{% for call in messages[0].tool_calls %}{{ call.function.name WRITTEN }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = template(source.replace("WRITTEN", written)).render(messages)
    assert rendered == ('f{"a": "é"}' if written.startswith("+") else "fé")
    with pytest.raises(RequestError, match="the chat template refused"):
        template("{{ 1 + messages[0].tool_calls }}").render(messages)


CALLS = "{% for m in messages %}{% for call in m.tool_calls %}WRITTEN;{% endfor %}{% endfor %}"
CUT = '{"city": "Köl'


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ 'call ' + call.function.arguments }}", f'call {{"a": 1}};call {CUT};'),
        (
            "{% if call.function.arguments is string %}{{ call.function.arguments }}"
            "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
            f'{{"a": 1}};{CUT};',
        ),
        (
            "{{ call.function.arguments | tojson }}",
            '{"a": 1};{"arguments": "{\\"city\\": \\"Köl"};',
        ),
        (
            "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}"
            "{% endfor %}",
            f"a=1;arguments={CUT};",
        ),
    ],
)
def test_a_call_that_was_cut_short_is_written_as_text_or_under_one_key(written, expected):
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"a": 1}', CUT)
    ]
    turn = with_readable_calls({"role": "assistant", "content": "", "tool_calls": calls})
    assert template(CALLS.replace("WRITTEN", written)).render([*HELLO, turn]) == expected


@pytest.mark.parametrize("text", ["[1]", "5", "x", '{"a": 1} and', '{"a": "\\ud800"}', "[" * 9999])
def test_arguments_that_are_no_json_object_stay_a_text(text):
    assert parsed_arguments(text) == text


@pytest.mark.parametrize("text", ["", " ", "null", "{}"])
def test_no_arguments_are_an_empty_object(text):
    assert parsed_arguments(text) == {}


R1 = (
    "{% for m in messages %}{% if m.content is none %}"
    "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (R1, 'h.f{"a": 1}'),
        ("{% for m in messages %}{{ m.content + '.' }}{{ m.tool_calls }}{% endfor %}", None),
    ],
)
def test_calls_without_a_text_are_written(source, expected):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "h"}]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    assert template(source).render(messages) == (expected or f"h..{[call]}")


CONTINUED = "{% for m in messages %}<{{ m.role }}>{{ m.content FILTER }}</end>{% endfor %}"
STARTED = [*HELLO, {"role": "assistant", "content": "I think  "}]


@pytest.mark.parametrize("filtered", ["", "| trim"])
def test_a_prompt_may_end_within_its_last_message(filtered):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source = CONTINUED.replace("FILTER", filtered)
    [expected], _ = chat.render_jinja_template(
        [STARTED], chat_template=source, continue_final_message=True
    )
    ours = template(source).render(STARTED, continue_final_message=True)
    assert ours == expected
    assert ours.rstrip().endswith("I think")


def test_a_last_message_that_the_template_changes_cannot_be_continued():
    with pytest.raises(RequestError, match="cannot be continued") as caught:
        template("{{ messages[0].content }}").render(STARTED, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize("content", [None, 5, [{"type": "image"}]])
def test_a_last_message_without_text_cannot_be_continued(content):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    with pytest.raises(RequestError) as caught:
        template("{{ messages }}").render(messages, continue_final_message=True)
    assert caught.value.field == "messages"


READS_TEXT = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}[{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}]{% endfor %}"
)
READS_BOTH = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}]{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "content_format", "content", "expected"),
    [
        (READS_TEXT, "auto", "a", "[a]"),
        (READS_TEXT, "auto", PARTS, "[a\nb]"),
        (READS_PARTS, "auto", "a", "[a]"),
        (READS_PARTS, "auto", PARTS, "[ab]"),
        (READS_BOTH, "auto", "a", "[a]"),
        (READS_BOTH, "auto", PARTS, "[ab]"),
        (READS_BOTH, "string", PARTS, "[a\nb]"),
        ("{{ messages | tojson }}", "auto", "a", '[{"role": "user", "content": "a"}]'),
        (READS_TEXT, "openai", "a", "[[{'type': 'text', 'text': 'a'}]]"),
        (READS_PARTS, "openai", "a", "[a]"),
    ],
)
def test_a_content_comes_in_the_form_that_the_template_reads(
    source, content_format, content, expected
):
    ours = ChatTemplate(source, {}, as_content_format(content_format))
    assert ours.render([{"role": "user", "content": content}]) == expected


def test_there_are_three_forms_of_a_content():
    with pytest.raises(ConfigError, match="auto, string, openai, got 'text'"):
        as_content_format("text")


def test_variables_reach_the_template_and_may_replace_its_special_tokens():
    ours = template("{{ bos_token }} {{ enable_thinking }}")
    assert ours.render(HELLO, variables={"enable_thinking": False}) == "<s> False"
    assert ours.render(HELLO, variables={"bos_token": "!"}) == "! "
    with pytest.raises(RequestError, match="'tools'") as caught:
        ours.render(HELLO, variables={"tools": []})
    assert caught.value.field == "chat_template_kwargs"


def test_functions_that_may_be_called_reach_the_template():
    source = "{% if tools is not none %}{{ tools | tojson }}{% else %}no tools{% endif %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(template(source).render(HELLO, tools=tools)) == tools
    assert template(source).render(HELLO) == "no tools"


def test_a_template_may_refuse_a_conversation():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template(source).render(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 'x' }}", "{{ missing.name }}"])
def test_content_that_the_template_cannot_use_is_the_requests_fault(source):
    with pytest.raises(RequestError) as caught:
        template(source).render([{"role": "user", "content": None}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "a"}], ["role content"], [5]]
)
def test_messages_need_a_role_and_a_content(messages):
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.field == "messages"


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(RequestError):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(HELLO)
    with pytest.raises(RequestError):
        template("{{ messages.append(1) }}").render(HELLO)


def test_a_broken_template_is_found_at_start_up():
    with pytest.raises(ConfigError, match="not valid Jinja"):
        template("{% if %}")


def write(path: Path, config: dict | None, jinja: str | None = None) -> None:
    if config is not None:
        text = json.dumps(config, ensure_ascii=False)
        (path / "tokenizer_config.json").write_text(text, "utf-8")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, "utf-8")


def rendered(path: Path, **options) -> str:
    found = ChatTemplate.from_directory(path)
    assert found is not None
    return found.render(HELLO, **options)


def test_special_tokens_come_from_the_checkpoint_in_both_spellings(tmp_path):
    config = {
        "bos_token": {"content": "<日>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_bos_token }}",
    }
    write(tmp_path, config)
    assert rendered(tmp_path) == "<日>|</s>||"


def test_older_checkpoints_have_their_special_tokens_in_a_file_of_their_own(tmp_path):
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}"}
    write(tmp_path, config)
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert rendered(tmp_path) == "<s>|</s>"
    write(tmp_path, {**config, "added_tokens_decoder": {}})  # not what transformers reads then
    assert rendered(tmp_path) == "|"


def test_the_template_file_comes_before_the_configuration(tmp_path):
    write(tmp_path, {"chat_template": "old", "bos_token": "<s>"}, "new {{ bos_token }}")
    assert rendered(tmp_path) == "new <s>"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    write(tmp_path, {"chat_template": named})
    assert rendered(tmp_path) == "b"


@pytest.mark.parametrize("in_files", [True, False])
def test_conversations_with_tools_have_a_template_of_their_own(in_files, tmp_path):
    with_tools = "{{ tools[0].function.name }}{{ bos_token }}"
    if in_files:
        write(tmp_path, {"bos_token": "<s>"}, "none")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools, "utf-8")
    else:
        named = [{"name": "default", "template": "none"}]
        named.append({"name": "tool_use", "template": with_tools})
        write(tmp_path, {"bos_token": "<s>", "chat_template": named})
    assert rendered(tmp_path) == "none"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(tmp_path, tools=tools) == "f<s>"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]"])
def test_a_configuration_that_cannot_be_read_is_named(content, tmp_path):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_directory(tmp_path)


def test_a_checkpoint_without_template_has_none(tmp_path):
    assert ChatTemplate.from_directory(tmp_path) is None
    write(tmp_path, {"bos_token": "<s>"})
    assert ChatTemplate.from_directory(tmp_path) is None


@pytest.mark.parametrize("expression", ["1 // x", "1 % x", "[] + x"])
def test_variables_that_a_template_cannot_use_are_the_requests_mistake(expression):
    source = f"{{% if x is defined %}}{{{{ {expression} }}}}{{% endif %}}"
    template = ChatTemplate(source, {})
    with pytest.raises(RequestError, match="the chat template refused"):
        template.render([{"role": "user", "content": "a"}], variables={"x": 0})
