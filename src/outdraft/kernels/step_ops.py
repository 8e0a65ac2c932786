"""A step of a target: its rows are laid out and read, and their drafts maybe verified.

Dimension key: W works, B of them sample, T rows, R rows whose logits are needed, N most drafts of
one request, S state rows, L tokens of a text, D hidden, K tapped layers.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from outdraft.attention.rows import RowBatch, Span
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kv.cache import LayerCache


class StatesOf(IntEnum):
    """The rows whose states after the last layer are wanted."""

    NO_ROW = 0
    ROWS_WITH_LOGITS = 1
    ALL_ROWS = 2


class Chooser(NamedTuple):
    """The choice of the works that sample: by the logits of their rows and by their texts.

    Attributes:
        sampling: of these works; `has_penalties_at_most`.
        rule: of the drafts that were drawn.
    """

    sampling: SamplingBatch
    rule: Rule


class StepTask(NamedTuple):
    """The rows that a step reads, and how it chooses.

    Attributes:
        spans: of the works, one at least; those that do not sample have no parents.
        facts: of the works that sample, lists to pass on with the rows: of each its row of the
            texts, the length of its text, and that of its prompt.
        token_ids_SL: int64, contiguous, on the model's device.
        drafts: of the works that sample; None: none does.
        are_shaped: positions and ancestors follow from the drafts' parents, not from the spans'.
        caches: one for each layer.
        taps: as in DecoderPass.
        chooser: None: nothing is chosen. Else what works emit is written to their texts.
        states_of: of rows with logits at least, if nothing is chosen or something is tapped.
        window: newest tokens of a text whose states are kept, as `place_states` counts; 0: none.
    """

    spans: Sequence[Span]
    facts: Sequence[Sequence[int]]
    token_ids_SL: Tensor
    drafts: DraftBatch | None
    are_shaped: bool
    caches: Sequence[LayerCache]
    block_size: int
    taps: Sequence[int]
    chooser: Chooser | None
    states_of: StatesOf
    window: int = 0

    @property
    def width(self) -> int:
        """N."""
        return 0 if self.drafts is None else self.drafts.width


class Choice(Protocol):
    """The tokens that requests emit."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def is_finite_R(self) -> Tensor:
        """bool: the raw logits of the row have a largest one that is finite, and no NaN."""
        ...

    @property
    def on_host(self) -> "KnownChoice | None":
        """The choice as lists where the host knows it already; None: it would have to wait."""
        ...


class KnownChoice(NamedTuple):
    """Numbers of a choice, as lists.

    Attributes:
        is_finite: [R].
        emitted, accepted: token_ids_BN1 and rows_BN of the verdict.
    """

    is_finite: list[bool]
    emitted: list[list[int]]
    accepted: list[list[int]]


class DeviceChoice(NamedTuple):
    """A choice in tensors, which may not be computed yet."""

    verdict: Verdict
    is_finite_R: Tensor
    on_host: None = None


class StatePlaces(NamedTuple):
    """Places of kept states, int64.

    Attributes:
        places_T: of each row's state; -1 for drafts that were refused, and for tokens before the
            newest `window` of those that the pass read.
        last_rows_W: the last row that each text keeps.
        last_places_W: that row's place.
    """

    places_T: Tensor
    last_rows_W: Tensor
    last_places_W: Tensor


class StepRead(NamedTuple):
    """The results of a task.

    Attributes:
        place: where the rows stand, with the facts; on the model's device. It makes tensors that
            few steps need.
        states_RD: of the wanted rows, as DecoderPass gives them; None: none are wanted.
        tapped_TKD: as DecoderPass gives them; None with the states.
        choice: None: the step does not choose.
        kept: places of kept states; None: none are kept, or the step does not choose.
    """

    place: Callable[[], RowBatch]
    states_RD: Tensor | None
    tapped_TKD: Tensor | None
    choice: Choice | None
    kept: StatePlaces | None = None
