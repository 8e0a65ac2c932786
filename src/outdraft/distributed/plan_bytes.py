"""What rank 0 tells the other ranks of a step, as bytes and back.

A value is written as the row of its fields, without their names and types: all ranks run the same
version. What many works of a plan have in common is written once, and they name its place. Only
engines of several ranks import this module; others run without msgspec.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import GenericAlias
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import numpy as np
from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder

from outdraft.core.admission import Admission, TokenRules
from outdraft.core.allowed import AllowedTokens
from outdraft.core.decision import LiveStop
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftSource
from outdraft.core.drafter_gap import DrafterGap
from outdraft.core.errors import RanksError
from outdraft.core.plan import MODEL_CHAIN, NO_DRAFT, DraftChoice, ModelDrafting, StepPlan, Work

Value = TypeVar("Value")


class _Rows(Generic[Value]):
    """Values of one type as rows of their fields.

    Attributes:
        of: the row of a value.
        written: the type of such a row, for msgspec.
    """

    def __init__(self, kind: type[Value], **written: Any) -> None:
        """`written`: types of the fields that are written in another form."""
        self._kind, hints = kind, get_type_hints(kind)
        self._names = [one.name for one in fields(kind)]  # pyright: ignore[reportArgumentType]
        self.of: Callable[[Value], tuple[Any, ...]] = attrgetter(*self._names)
        self.written = _row_type([written.get(name, hints[name]) for name in self._names])

    def value(self, row: tuple[Any, ...]) -> Value:
        return self._kind(**dict(zip(self._names, row, strict=True)))


def _row_type(parts: list[Any]) -> Any:
    return GenericAlias(tuple, tuple(parts))


class _WrittenDraft(NamedTuple):
    """A Draft; `parents` None: a chain."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None
    score: float
    match_length: int


class _WrittenChoice(NamedTuple):
    """A DraftChoice; its source, model and live rule are places."""

    source: int
    draft: _WrittenDraft | None
    num_model_drafts: int
    model: int
    stop: int | None


_SOURCES, _CHAIN = tuple(DraftSource), tuple(range(MAX_DRAFTS))
_PLACES = {source: place for place, source in enumerate(_SOURCES)}
_GAPS, _RULES = _Rows(DrafterGap), _Rows(TokenRules)
_MODELS, _STOPS = _Rows(ModelDrafting), _Rows(LiveStop)
_ADMISSIONS = _Rows(Admission, token_ids=bytes, rules=_RULES.written)
_PLANS = _Rows(StepPlan, works=list[Any], admissions=list[_ADMISSIONS.written])
_DRAFTS_PLACE, _GAP_PLACE = Work._fields.index("drafts"), Work._fields.index("gap")
_WORK = _row_type(
    [
        {"drafts": _WrittenChoice | None, "gap": _GAPS.written | None}.get(name, hint)
        for name, hint in get_type_hints(Work).items()
    ]
)


class _WrittenPlan(NamedTuple):
    """A StepPlan whose works are written apart; the works' models (behind MODEL_CHAIN, which all
    ranks know) and live rules."""

    plan: _PLANS.written  # pyright: ignore[reportInvalidTypeForm]
    works: list[_WORK]  # pyright: ignore[reportInvalidTypeForm]
    models: list[_MODELS.written]  # pyright: ignore[reportInvalidTypeForm]
    stops: list[_STOPS.written]  # pyright: ignore[reportInvalidTypeForm]


class _WrittenAllowed(NamedTuple):
    """AllowedTokens; rows that allow everything are left out.

    Attributes:
        shape: of all masks.
        rows: int32, the others' places.
        masks, ends: int32 and int64.
    """

    shape: tuple[int, int]
    rows: bytes
    masks: bytes
    ends: bytes


_encoder = Encoder()
_plan_decoder, _allowed_decoder = Decoder(_WrittenPlan), Decoder(_WrittenAllowed)


@dataclass(slots=True)
class _Shared(Generic[Value]):
    """What works have in common, each once, in the order of its first use."""

    values: list[Value] = field(default_factory=list[Value])
    places: dict[int, int] = field(default_factory=dict[int, int])

    def place(self, value: Value) -> int:
        found = self.places.setdefault(id(value), len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


def plan_as_bytes(plan: StepPlan) -> bytes:
    """For `plan_of_bytes`."""
    models, stops = _Shared([MODEL_CHAIN], {id(MODEL_CHAIN): 0}), _Shared[LiveStop]()
    works: list[tuple[Any, ...]] = []
    for work in plan.works:
        row: tuple[Any, ...] = work
        if work.drafts is not None or work.gap is not None:
            changed: list[Any] = list(work)
            if work.drafts is not None:
                changed[_DRAFTS_PLACE] = _written_choice(work.drafts, models, stops)
            if work.gap is not None:
                changed[_GAP_PLACE] = _GAPS.of(work.gap)
            row = tuple(changed)
        works.append(row)
    own = dict(zip(_names(StepPlan), _PLANS.of(plan), strict=True))
    own["works"] = ()
    own["admissions"] = [_written_admission(one) for one in plan.admissions]
    written = (
        tuple(own.values()),
        works,
        [_MODELS.of(one) for one in models.values[1:]],
        [_STOPS.of(one) for one in stops.values],
    )
    return _encoder.encode(written)


def plan_of_bytes(data: bytes) -> StepPlan:
    """Raises RanksError: these bytes are no plan."""
    try:
        written = _plan_decoder.decode(data)
        models = [MODEL_CHAIN, *map(_MODELS.value, written.models)]
        stops = [_STOPS.value(row) for row in written.stops]
        works = tuple([_read_work(row, models, stops) for row in written.works])
        own = dict(zip(_names(StepPlan), written.plan, strict=True))
        own["works"] = works
        own["admissions"] = tuple([_read_admission(row) for row in own["admissions"]])
        return StepPlan(**own)
    except (MsgspecError, ValueError, IndexError) as error:
        raise RanksError(f"a plan cannot be read: {error}") from error


def allowed_as_bytes(allowed: AllowedTokens) -> bytes:
    """For `allowed_of_bytes`."""
    masks_RW, ends_2E = allowed.masks_RW, allowed.ends_2E
    rows = np.flatnonzero((masks_RW != -1).any(axis=1)).astype(np.int32)
    return _encoder.encode(
        _WrittenAllowed(
            masks_RW.shape,
            rows.tobytes(),
            masks_RW[rows].tobytes(),
            ends_2E.tobytes(),
        )
    )


def allowed_of_bytes(data: bytes) -> AllowedTokens:
    """Raises RanksError: these bytes are no masks."""
    try:
        written = _allowed_decoder.decode(data)
        masks_RW = np.full(written.shape, -1, dtype=np.int32)
        rows = np.frombuffer(written.rows, np.int32)
        masks_RW[rows] = np.frombuffer(written.masks, np.int32).reshape(-1, written.shape[1])
        ends_2E = np.frombuffer(written.ends, np.int64).reshape(2, -1).copy()
        return AllowedTokens(masks_RW, ends_2E)
    except (MsgspecError, ValueError, IndexError) as error:
        raise RanksError(f"masks cannot be read: {error}") from error


def _names(kind: type) -> list[str]:
    return [one.name for one in fields(kind)]


def _written_choice(
    choice: DraftChoice, models: _Shared[ModelDrafting], stops: _Shared[LiveStop]
) -> _WrittenChoice:
    draft: _WrittenDraft | None = None
    if len(choice.draft):
        own = choice.draft
        parents = None if own.is_chain else own.parents
        draft = _WrittenDraft(own.token_ids, parents, own.score, own.match_length)
    return _WrittenChoice(
        _PLACES[choice.source],
        draft,
        choice.num_model_drafts,
        models.place(choice.model),
        None if choice.stop is None else stops.place(choice.stop),
    )


def _read_work(row: tuple[Any, ...], models: list[ModelDrafting], stops: list[LiveStop]) -> Work:
    choice, gap = row[_DRAFTS_PLACE], row[_GAP_PLACE]
    if choice is None and gap is None:
        return Work._make(row)
    changed = list(row)
    if choice is not None:
        changed[_DRAFTS_PLACE] = _read_choice(choice, models, stops)
    if gap is not None:
        changed[_GAP_PLACE] = _GAPS.value(gap)
    return Work._make(changed)


def _read_choice(
    written: _WrittenChoice, models: list[ModelDrafting], stops: list[LiveStop]
) -> DraftChoice:
    source, own, num_model_drafts, model, stop = written
    draft = NO_DRAFT
    if own is not None:
        token_ids, parents, score, match_length = own
        if parents is None:
            parents = _CHAIN[: len(token_ids)]
        draft = Draft(token_ids, parents, score, match_length)
    rule = None if stop is None else stops[stop]
    return DraftChoice(_SOURCES[source], draft, num_model_drafts, models[model], rule)


def _written_admission(admission: Admission) -> tuple[Any, ...]:
    assert admission.token_ids.dtype == np.int32
    own = dict(zip(_names(Admission), _ADMISSIONS.of(admission), strict=True))
    own |= {"token_ids": admission.token_ids.tobytes(), "rules": _RULES.of(admission.rules)}
    return tuple(own.values())


def _read_admission(row: tuple[Any, ...]) -> Admission:
    own = dict(zip(_names(Admission), row, strict=True))
    own["token_ids"] = np.frombuffer(own["token_ids"], np.int32).copy()
    own["rules"] = _RULES.value(own["rules"])
    return Admission(**own)
