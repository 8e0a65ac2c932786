"""Offline generation: all prompts at once, blocking, with vLLM's calling conventions."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from tqdm import tqdm

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, GenerationError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, Queued
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import Prompt, is_one_prompt
from outdraft.loading.memory import MemoryPlan
from outdraft.loading.models import LoadedModels, tokenizer_path
from outdraft.models.checkpoints.config_json import default_sampling
from outdraft.ranks.launch import load_on_ranks
from outdraft.text.chat import (
    ChatTemplate,
    ContentFormat,
    Message,
    TextTokenizer,
    as_content_format,
    special_tokens,
    with_readable_calls,
)

_logger = logging.getLogger(__name__)


class LLM:
    """A model, ready to generate.

        llm = LLM(model="path/or/name", speculative_config={"method": "suffix"})
        outputs = llm.generate(["def add("], SamplingParams(max_tokens=32))

    Options are the fields of EngineConfig and its parts, and `speculative_config` with vLLM's
    keys. An unknown option is a ConfigError that names the closest known one.
    """

    def __init__(
        self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._start(
            EngineConfig.from_options(model=model, speculative_config=speculative_config, **options)
        )

    @classmethod
    def from_config(cls, config: EngineConfig, models: LoadedModels | None = None) -> "LLM":
        """Build from a whole configuration; `models` shares weights that are loaded already."""
        llm = cls.__new__(cls)
        llm._start(config, models)
        return llm

    def _start(self, config: EngineConfig, models: LoadedModels | None = None) -> None:
        self.config = config
        self.models = models = models or load_on_ranks(config)
        self.engine: Engine
        self.memory: MemoryPlan
        try:
            self.engine, self.memory = build_engine(config, models)
            _logger.info("memory of %s:\n%s", config.model, self.memory)
            self._default_sampling = default_sampling(config, models.path)
            self._tokenizer_path = tokenizer_path(config, models.path)
            self._chat_template = ChatTemplate.from_directory(self._tokenizer_path)
        except BaseException:
            if models.processes is not None:
                models.processes.end()  # a caller that keeps the error must not keep them alive
            raise
        self._num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a call without any: `generation_config`, else the defaults."""
        return SamplingParams(**self._default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, in order: texts, token ids, or vLLM's dicts of either.

        Raises:
            RequestError: a prompt or its parameters are wrong; then nothing was started.
            GenerationError: some requests failed while they ran; it has all outputs.
        """
        several = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _per_prompt(sampling_params, len(several))
        ranks = list(priority) if priority is not None else [0] * len(several)
        for name, given in (("sampling_params", params), ("priority", ranks)):
            if len(given) != len(several):
                message = f"{name} has {len(given)} entries for {len(several)} prompts"
                raise RequestError(message, name)
        encoded = [
            self.engine.check_request(prompt, one)
            for prompt, one in zip(several, params, strict=True)
        ]
        first = self._num_requests
        self._num_requests += len(several)
        ids = [str(first + i) for i in range(len(several))]
        finished = self._run(list(zip(ids, encoded, params, ranks, strict=True)), use_tqdm)
        outputs = [finished[request_id] for request_id in ids]
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise GenerationError(
                f"{len(failed)} of {len(outputs)} requests failed: {failed[0]}", outputs
            )
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; ChatTemplate.render explains the options.

        `chat_template` is a template's text, in place of the checkpoint's own.

        Raises:
            RequestError: there is no template, or it refuses a conversation; or from `generate`.
            ConfigError: `chat_template` is no template.
        """
        template = self._chat_template
        content_format = as_content_format(chat_template_content_format)
        if chat_template is not None:
            names = special_tokens(self._tokenizer_path)
            template = ChatTemplate(chat_template, names, content_format)
        elif content_format is not ContentFormat.AUTO:
            template = ChatTemplate.from_directory(self._tokenizer_path, content_format)
        if template is None:
            raise RequestError(
                f"{self._tokenizer_path} brings no chat template: use generate", "messages"
            )
        is_one = not messages or isinstance(messages[0], Mapping)
        texts = [
            template.render(
                [with_readable_calls(message) for message in one],  # pyright: ignore[reportArgumentType]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for one in ([messages] if is_one else messages)
        ]
        # The template has written all special tokens; the tokenizer must not add its own.
        prompts = [self.engine.inputs.encoded(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End the other ranks' processes, if there are some, and so the use of this engine.

        They also end with this object, and with this process.
        """
        if self.engine.ranks is not None:
            self.engine.ranks.end()

    def get_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer: texts and conversations to ids, and ids to texts.

        Raises:
            ConfigError: the model came without a tokenizer.
        """
        if self.models.tokenizer is None:
            raise ConfigError(f"{self._tokenizer_path} holds no tokenizer")
        return TextTokenizer(self.models.tokenizer, self._chat_template)

    def _run(self, requests: Sequence[Queued], use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        hidden = None if use_tqdm else True  # None: shown on a terminal only
        bar = tqdm(total=len(requests), desc="requests", unit="req", disable=hidden, smoothing=0)
        steps = Assembler(self.engine).run(requests)
        with bar, torch.inference_mode(), closing(steps):
            for outputs in steps:
                for output in outputs:
                    if output.finished:
                        finished[output.request_id] = output
                        bar.update()
                length = self.engine.stats.acceptance_length
                bar.set_postfix_str(f"acceptance length {length:.2f}")
        return finished


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if is_one_prompt(prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    if not isinstance(prompts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers'
        raise RequestError(f"prompts must be one prompt or a list, got {prompts!r:.80}", "prompts")
    return list(prompts)  # pyright: ignore[reportReturnType]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    is_list = isinstance(params, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]  # callers'
    if not is_list or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, got {params!r:.80}",
            "sampling_params",
        )
    return list(params)
