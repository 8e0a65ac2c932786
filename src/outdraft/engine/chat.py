"""Conversations to prompts, by the Jinja template that a checkpoint brings along."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outdraft.core.errors import ConfigError, RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages as the model was trained to read them; the template runs in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _raise  # pyright: ignore[reportArgumentType]
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_directory(cls, path: Path) -> "ChatTemplate | None":
        """The checkpoint's template (chat_template.jinja or tokenizer_config.json), if any."""
        config = _tokenizer_config(path)
        separate = path / "chat_template.jinja"
        source = separate.read_text("utf-8") if separate.exists() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named: dict[str, str] = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if source is None:
            return None
        return cls(source, special_tokens(path))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation; `tools` are functions that the model may call.

        Raises:
            RequestError: a message has no role or content, or the template refuses it.
        """
        if not messages:
            raise RequestError("messages must hold at least one message", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not message.keys() >= {"role", "content"}:
                raise RequestError("every message needs a role and a content", "messages")
        try:
            return self._template.render(
                messages=list(messages),
                # Templates tell "no tools" (None) from a name that they do not know.
                tools=list(tools) if tools is not None else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:  # content of an unexpected shape
            raise RequestError(
                f"the chat template refused the messages: {error}", "messages"
            ) from error


def special_tokens(path: Path) -> dict[str, str]:
    """What a checkpoint's templates may write: bos_token, eos_token, ..."""
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in _tokenizer_config(path).items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
