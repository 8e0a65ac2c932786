"""Log-probabilities by the compiled library, see csrc/scores.cpp.

Dimension key: as in kernels/torch/scores.py.
"""

import ctypes
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.data.scores import Scores
from outdraft.kernels.native.arrays import Addresses
from outdraft.kernels.native.team import Team


class _Task(ctypes.Structure):
    """As `ScoreTask` of csrc/scores.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "chosen")),
        *((name, c_int64) for name in ("size", "num_top")),
        *((name, c_void_p) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")),
    )


class NativeScores:
    """As `sampling_ops.ScoreTokens`, of float32 logits on the CPU; sums are float64."""

    def __init__(self, team: Team) -> None:
        arguments = [c_void_p, c_int64, POINTER(_Task)]
        self._score = team.library.function("score_tokens", arguments, releases_gil=True)
        self._team = team

    def __call__(
        self, logits_AV: Tensor, chosen_R: Tensor, num_top: int, rows_R: Tensor | None = None
    ) -> Scores:
        at, (num_rows, size) = Addresses(), (len(chosen_R), logits_AV.shape[1])
        num_top = min(num_top, size)
        if rows_R is None:
            rows_R = torch.arange(num_rows)
        scores = Scores(
            torch.empty(num_rows),
            torch.empty(num_rows, dtype=torch.int64),
            torch.empty(num_rows, num_top, dtype=torch.int64),
            torch.empty(num_rows, num_top),
        )
        task = _Task(
            at(logits_AV, torch.float32),
            at(rows_R, torch.int64),
            at(chosen_R, torch.int64),
            size,
            num_top,
            *[part.data_ptr() for part in scores],
        )
        self._score(self._team.address, num_rows, ctypes.byref(task))
        return scores
