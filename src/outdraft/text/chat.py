"""Renders conversations to prompts, by the Jinja template of a checkpoint."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from outdraft.config.fields import as_choice
from outdraft.core.errors import ConfigError, RequestError
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import tokenizer_config_of_gguf

Message = Mapping[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def with_named_thoughts(message: Message) -> Message:
    """Repeat a message's thoughts under the other names that templates read, as transformers does:
    gpt-oss's reads `thinking`."""
    given = [message[name] for name in _THOUGHTS if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


def with_readable_calls(message: Message) -> Message:
    """Turn a message in OpenAI's form into one that templates read; without calls it stays.

    Arguments become objects, as templates write JSON themselves. A message with calls and no
    content gets an empty text.
    """
    changed = _with_arguments(message, str, parsed_arguments)
    if changed is message or message.get("content") is not None:
        return changed
    return {**changed, "content": ""}


def _with_arguments(message: Message, kind: type, change: Callable[[Any], Any]) -> Message:
    """Change the arguments of a message's calls that have this type; without calls it stays."""
    # A caller may give anything that looks like messages; `render` refuses what is none.
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list | tuple) or not calls:
        return message

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), kind):
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return {**message, "tool_calls": [changed(call) for call in calls]}


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON, with the parameters of transformers' filter in the same order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _under_one_key(text: str) -> object:
    return {"arguments": text} if isinstance(parsed_arguments(text), str) else text


def parsed_arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call; text that is no JSON object, such as one that was cut short,
    stays as it is."""
    try:
        arguments: object = json.loads(text.strip() or "{}")
        _json(arguments).encode()  # fails for half of a surrogate pair, which no prompt may hold
    except (ValueError, RecursionError):
        return text
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else text


_OWN_VARIABLES = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
}
_PROBE = "a text to look for"
_CUT_ARGUMENTS = f'{{"{_PROBE}'
_NOTATION = re.compile(rf"""['"]text['"]: ?['"]{_PROBE}""")  # Python's or JSON's
# Errors that a template may raise for values of unexpected types.
_RENDERING = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
_MARK = "[the last message goes on here] "


class ContentFormat(StrEnum):
    """The form in which a template reads the content of a message.

    AUTO: text, and lists of parts where the template can read them; STRING: text always; OPENAI:
    always a list of parts, each {"type": "text", "text": ...}.
    """

    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


def as_content_format(name: str) -> ContentFormat:
    """Parse a name. Raises ConfigError if there is no such format."""
    return as_choice("chat_template_content_format", name, ContentFormat)


class _GenerationTag(Extension):
    """{% generation %} marks for training the text of a model; it changes no text.

    As in transformers, variables set inside are unknown after {% endgeneration %}.
    """

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


class ChatTemplate:
    """Renders messages as the model was trained to read them; the template runs in a sandbox."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.globals["raise_exception"] = _raise  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = _now_as  # pyright: ignore[reportArgumentType]
        environment.filters["tojson"] = _json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._of_tools: ChatTemplate | None = None  # writes conversations with tools in its place
        self.reads_parts = content_format is ContentFormat.OPENAI
        self.reads_text = not self.reads_parts
        if content_format is ContentFormat.AUTO:
            self.reads_parts = self._shows([_text_part(_PROBE)])
            self.reads_text = self._shows(_PROBE) or not self.reads_parts
        self._takes_texts = True  # as arguments of calls that are no JSON object
        self._calls_say_nothing = False  # of DeepSeek R1, which leaves out calls beside a text
        is_written, is_written_alone = (_PROBE in self._written_call(one, {}) for one in ("", None))
        self._calls_say_nothing = is_written_alone and not is_written
        # Others would write a text into quotation marks, or look for an object's parts in it.
        self._takes_texts = _CUT_ARGUMENTS in self._written_call("", _CUT_ARGUMENTS)

    @classmethod
    def from_directory(
        cls, path: Path, content_format: ContentFormat = ContentFormat.AUTO
    ) -> "ChatTemplate | None":
        """The checkpoint's template (chat_template.jinja or tokenizer_config.json), if any.

        The one named `tool_use` is for conversations with tools, as in transformers.
        """
        sources, names = _named_sources(path), special_tokens(path)
        if "default" not in sources:
            return None
        template = cls(sources["default"], names, content_format)
        if "tool_use" in sources:
            template._of_tools = cls(sources["tool_use"], names, content_format)
        return template

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation; `tools` are functions that the model may call.

        The prompt ends with the beginning of an answer (`add_generation_prompt`, the default), or
        within the last message, which the model then goes on with (`continue_final_message`).
        `variables`: more of what the template reads, such as `enable_thinking`.

        Raises:
            RequestError: a message has no role or content, or the template refuses it; or the
                options contradict each other.
        """
        if not messages:
            raise RequestError("messages must hold at least one message", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not message.keys() >= {"role", "content"}:
                raise RequestError("every message needs a role and a content", "messages")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt must be false with continue_final_message: the prompt ends "
                "either with a new message or within the last one",
                "add_generation_prompt",
            )
        for name in _OWN_VARIABLES & (variables or {}).keys():
            raise RequestError(
                f"chat_template_kwargs cannot set {name!r}: it is a parameter of its own",
                "chat_template_kwargs",
            )
        writer = self._of_tools if self._of_tools is not None and tools is not None else self
        readable = [writer._readable(message) for message in messages]
        if continue_final_message:
            readable[-1] = _marked(readable[-1])
        options = {
            **(variables or {}),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = writer._rendered_in_a_form(readable, options)
        except _RENDERING as error:  # content or variables of an unexpected shape
            raise RequestError(
                f"the chat template refused the messages: {error}", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _rendered_in_a_form(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """Render the messages; the arguments of calls become JSON texts if the template cannot
        write objects. Most can, but DeepSeek's cannot."""
        try:
            return self._rendered(messages, **options)
        except _RENDERING:
            as_text = [_with_arguments(message, Mapping, _json) for message in messages]
            if as_text != messages:
                with suppress(*_RENDERING):
                    return self._rendered(as_text, **options)
            raise  # the first error: it is about the messages as they were sent

    def _tried(self, messages: Sequence[Message]) -> str:
        """Render messages without any option; "" if the template cannot."""
        try:
            return self._rendered_in_a_form(messages, {})
        except _RENDERING:
            return ""

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        # Templates distinguish "no tools" (None) from an undefined name.
        values = {"documents": None, "tools": None, "add_generation_prompt": True}
        return self._template.render(values | self._special_tokens | options, messages=messages)

    def _shows(self, content: object) -> bool:
        """Return True if the template writes the text of such a content, and not its notation."""
        text = self._tried([{"role": "user", "content": content}])
        return _PROBE in text and not _NOTATION.search(text)

    @cached_property
    def takes_several_calls(self) -> bool:
        """True if a message may have several calls; Llama 3's templates refuse two."""
        if self._of_tools is not None:
            return self._of_tools.takes_several_calls
        one, two = (self._written_call(None, {}, number).count(_PROBE) for number in (1, 2))
        return one == 0 or two > one

    def _written_call(self, content: str | None, arguments: object, number: int = 1) -> str:
        """Render calls that stand beside such a content; "" if the template cannot."""
        calls = [
            {
                "id": f"call0000{place}",
                "type": "function",
                "function": {"name": _PROBE, "arguments": arguments},
            }
            for place in range(number)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        messages = {"role": "user", "content": "a"}, answer
        return self._tried([self._readable(one) for one in messages])

    def _readable(self, message: Message) -> dict[str, Any]:
        """Convert content, thoughts and calls of a message to the form that the template reads."""
        message = with_named_thoughts(message)
        if not self._takes_texts:
            message = _with_arguments(message, str, _under_one_key)
        content = message["content"]
        if self._calls_say_nothing and message.get("tool_calls") and not content:
            content = None
        elif isinstance(content, str):
            content = content if self.reads_text else [_text_part(content)]
        elif isinstance(content, Sequence) and not self.reads_parts:
            content = "\n".join(_text_of(part) for part in content)  # as vLLM does
        return {**message, "content": content}


class TextTokenizer:
    """A model's tokenizer with the methods that it has in vLLM and transformers.

    `backend_tokenizer` has all methods of the library."""

    def __init__(self, backend_tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.backend_tokenizer, self.template = backend_tokenizer, template

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Render the prompt of a conversation, as ids or as text. `variables` go to the template.

        Raises:
            RequestError: there is no template, or ChatTemplate.render raises it.
        """
        if self.template is None:
            raise RequestError("the model has no chat template", "conversation")
        text = self.template.render(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    raise RequestError('a part of a content must be {"type": "text", "text": ...}', "messages")


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Put a mark after the text of a message."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    if isinstance(content, Sequence) and content and isinstance(content[-1], Mapping):
        last = {**content[-1], "text": _text_of(content[-1]) + _MARK}
        return {**message, "content": [*content[:-1], last]}
    raise RequestError("continue_final_message needs a last message with text", "messages")


def _cut_at_mark(text: str) -> str:
    """The text before the mark; without its last blanks if the template dropped the mark's."""
    before, found, after = text.rpartition(_MARK.rstrip())
    if not found:
        raise RequestError(
            "the chat template does not write the last message as it is, so it cannot be continued",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _named_sources(path: Path) -> dict[str, str]:
    """A checkpoint's templates by name; one that has no name is the default."""
    separate = path / "chat_template.jinja"
    if separate.exists():
        others = (path / "additional_chat_templates").glob("*.jinja")
        files = {file.stem: file for file in others} | {"default": separate}
        return {name: file.read_text("utf-8") for name, file in files.items()}
    found = _tokenizer_config(path).get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {} if found is None else {"default": found}


def special_tokens(path: Path) -> dict[str, str]:
    """The tokens that a checkpoint's templates may write, by names: bos_token, eos_token, ..."""
    values, older = _tokenizer_config(path), path / "special_tokens_map.json"
    if "added_tokens_decoder" not in values and older.exists():  # as transformers reads them
        values |= read_json(older)
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in values.items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }


def _tokenizer_config(path: Path) -> dict[str, Any]:
    if is_gguf(path):
        return tokenizer_config_of_gguf(path)
    file = path / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now_as(form: str) -> str:
    """The local time, for templates that write today's date."""
    return datetime.now().strftime(form)
