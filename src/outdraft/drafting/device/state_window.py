"""The target's states of each running request's newest tokens, for drafters that read them.

A drafter that pauses finds the states of the last tokens when it goes on, and reads those. All
others are gone: memory for more than a window would grow with the length of the texts.

Dimension key: S state rows, W tokens of a window, T rows, F numbers of a feature, L tokens.
"""

import torch

from outdraft.core.draft import STATE_WINDOW


class StateWindow:
    """features_NF: one feature for each place; the one of token i of the text in row s is at
    s * W + i % W. New memory is zero, so what was never written is finite."""

    def __init__(
        self,
        num_state_rows: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int = STATE_WINDOW,
    ) -> None:
        self.num_tokens = num_tokens
        # The last place takes writes that must go nowhere: those of place -1.
        num_places = num_state_rows * num_tokens + 1
        self.features_NF = torch.zeros(num_places, size, dtype=dtype, device=device)

    def places(self, state_row: int, start: int, count: int) -> list[int]:
        """Where the tokens from `start` on have their features."""
        first, size = state_row * self.num_tokens, self.num_tokens
        return [first + token % size for token in range(start, start + count)]
