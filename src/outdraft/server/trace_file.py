"""Writes a trace: one line for each request that has ended, in the order in which they end."""

import logging
import os
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from outdraft.config.speculation import SpeculationConfig
from outdraft.core.errors import ConfigError
from outdraft.core.recorded import RecordedOutput, RecordedRequest
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.request_limits import verification_rule
from outdraft.engine.assembly import RequestAssembly

_logger = logging.getLogger(__name__)


class TraceFile(AbstractContextManager["TraceFile"]):
    """A new file that only its owner may read: with the tokenizer, ids are as good as texts.

    A line is written whole or not at all. Where that fails, as on a full disk, the recording ends
    with an error in the log, and the server goes on. Use as a context manager.
    """

    def __init__(self, path: Path, config: SpeculationConfig) -> None:
        """
        Raises:
            ConfigError: there is such a file already, or it cannot be made.
        """
        self.path = path
        self.started_s = time.monotonic()
        self._config = config
        try:
            self._file = open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600))  # noqa: SIM115
        except FileExistsError:
            raise ConfigError(
                f"--record-trace: {path} exists already: remove it, or name another file"
            ) from None
        except OSError as error:
            raise ConfigError(f"--record-trace: {path} cannot be made: {error.strerror}") from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def record(
        self,
        assembly: RequestAssembly,
        params: SamplingParams,
        max_model_len: int,
        unfinished: FinishReason,
    ) -> None:
        """Write the line of a request that has ended, or is given up now.

        Args:
            assembly: one that keeps steps.
            params: its prediction is none, or ids.
            unfinished: why sequences without an end have none.
        """
        output, asked, network = assembly.output, params.speculation, self._config.network
        prompt_ids, arrival_s = output.prompt_token_ids, output.metrics.arrival_s
        room = max_model_len - len(prompt_ids)
        prediction = params.prediction
        assert not isinstance(prediction, str)
        outputs = [
            RecordedOutput(
                list(completion.token_ids),
                completion.finish_reason or str(unfinished),  # pyright: ignore[reportArgumentType]
                steps,
            )
            for completion, steps in zip(output.outputs, assembly.steps, strict=True)
        ]
        self.write(
            RecordedRequest(
                format=1,
                arrival_s=round(max(0.0, arrival_s - self.started_s), 6),
                elapsed_s=round(time.monotonic() - arrival_s, 6),
                prompt_token_ids=prompt_ids,
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                temperature=float(params.temperature),
                rule=verification_rule(self._config, params),
                outputs=outputs,
                num_cached_tokens=output.num_cached_tokens,
                may_draft=asked.enabled,
                method=asked.method,
                num_speculative_tokens=asked.num_speculative_tokens,
                prediction_token_ids=list(prediction or ()),
                tree=list(network.tree.levels) if network and network.tree else [],
            )
        )

    def write(self, request: RecordedRequest) -> None:
        """Append a line, if the recording has not ended."""
        if self._file.closed:
            return
        line, size = msgspec.json.encode(request) + b"\n", self._file.tell()
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError as error:
            _logger.error("the trace %s ends here: %s", self.path, error)
            self._file.truncate(size)
            self._file.close()
