"""A model's tokenizer as callers of `LLM.get_tokenizer` know it from vLLM and transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.engine.chat import ChatTemplate, Message


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Makes ids of texts and back. `backend_tokenizer` has all that the library can do."""

    backend_tokenizer: Tokenizer
    template: ChatTemplate | None

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
        """The prompt of a conversation, as ids or as text. `variables` go to the template.

        Raises:
            RequestError: there is no template, or as ChatTemplate.render.
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
