"""Steps in one call: bit for bit what the parts make, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.core.draft import Draft
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.ops import DecoderPass, Kernels
from outdraft.kernels.step_ops import StatesOf, StepRead, StepTask
from outdraft.kv.cache import KVCache, LayerCache
from outdraft.runner.step_rows import read_by_parts
from tests.kernels.decoders import (
    BLOCK_SIZE,
    CPU,
    NUM_TOKENS,
    Sizes,
    blocks_of,
    filled_cache,
    make_spec,
)
from tests.kernels.tables import cpu_kernels, each_library

ROW_LEN = 150
LAST = len(Sizes().windows)  # what is tapped behind the last layer is of all rows


@dataclass
class Target:
    """What `read_by_parts` asks of a model."""

    kernels: Kernels
    passes: DecoderPass

    def forward_tapped(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.passes(token_ids_T, caches, metadata, taps, None, wanted_R)

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        return self.passes.best_tokens(hidden_RD)


@dataclass
class Step:
    """The works of a step: what of the texts in rows 2, 0, 1 is read, and their drafts."""

    reads: list[tuple[int, int, bool]]  # tokens before the rows, rows of the text, samples
    drafts: list[Draft]  # of those that sample
    are_shaped: bool
    chooses: bool
    taps: tuple[int, ...]
    states_of: StatesOf

    def task(self, texts_SL: Tensor, cache: KVCache) -> StepTask:
        left = list(self.drafts)
        spans, rows, lengths = [], [], []
        for place, (context_len, num_causal, samples) in enumerate(self.reads):
            row = (place + 2) % 3
            parents = left.pop(0).parents if samples else ()
            if self.are_shaped:  # a chain stands where the network drafts a tree
                parents = range(len(parents))
            spans.append(
                Span(context_len, num_causal, parents, blocks_of(row), row * ROW_LEN, samples)
            )
            if samples:
                rows.append(row)
                lengths.append(context_len + num_causal)
        return StepTask(
            spans,
            (rows, lengths, lengths),
            texts_SL,
            DraftBatch.from_drafts(self.drafts, CPU) if self.drafts else None,
            self.are_shaped,
            cache.layers,
            BLOCK_SIZE,
            self.taps,
            self.chooses,
            self.states_of,
        )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    sizes = st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans())
    reads = draw(st.lists(sizes, min_size=1, max_size=3))
    drafts = []
    for _, _, samples in reads:
        if samples:
            number = draw(st.integers(0, 7))
            ids = tuple(draw(st.integers(0, NUM_TOKENS - 1)) for _ in range(number))
            drafts.append(Draft(ids, tuple(draw(st.integers(0, row)) for row in range(number))))
    chooses = bool(drafts) and draw(st.booleans())
    taps = draw(st.sampled_from([(), (0,), (1, 0), (LAST,)]))
    least = StatesOf.NO_ROW if chooses and not taps else StatesOf.ROWS_WITH_LOGITS
    states_of = draw(st.sampled_from([one for one in StatesOf if one >= least]))
    are_shaped = any(map(len, drafts)) and draw(st.booleans())
    return Step(reads, drafts, are_shaped, chooses, taps, states_of)


def read(step: Step, target: Target, dtype: torch.dtype, *, in_parts: bool) -> list[Tensor]:
    """All that came of a step, and the texts and the cache behind it."""
    generator = torch.Generator().manual_seed(1)
    texts_SL = torch.randint(NUM_TOKENS, (3, ROW_LEN), generator=generator)
    cache = filled_cache(Sizes(), dtype)
    task = step.task(texts_SL, cache)

    def by_parts() -> StepRead:
        assert target.passes is not None
        return read_by_parts(target, task)

    came = by_parts() if in_parts else target.passes.step(task, by_parts)
    rows = came.place()
    results = [texts_SL]
    results += [getattr(rows, name) for name in ("state_index_T", "draft_index_T", "root_rows_B")]
    results += [rows.logit_rows_R, rows.draft_slots_BN, rows.positions_T]
    results += [rows.ancestors_T, rows.slots_T, *rows.extra]
    if step.states_of is not StatesOf.NO_ROW:
        assert came.states_RD is not None
        assert came.tapped_TKD is not None
        results += [came.states_RD, came.tapped_TKD]
    if step.chooses:
        assert came.choice is not None
        verdict, known = came.choice.verdict, came.choice.on_host
        results += [verdict.token_ids_BN1, verdict.num_emitted_B, verdict.rows_BN]
        results.append(came.choice.is_finite_R)
        if known is not None:
            assert known.emitted == verdict.token_ids_BN1.tolist()
            assert known.accepted == verdict.rows_BN.tolist()
            assert known.is_finite == came.choice.is_finite_R.tolist()
    return [*results, *(x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE))]


@each_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@given(step=steps())
def test_a_step_in_one_call_is_what_its_parts_make(name, dtype, step):
    kernels = cpu_kernels(1, name)
    target = Target(kernels, kernels.compile_decoder(make_spec(Sizes(), kernels, dtype)))
    got, want = (read(step, target, dtype, in_parts=parts) for parts in (False, True))
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_a_plain_greedy_step_is_one_call():
    kernels = cpu_kernels(1)
    passes = kernels.compile_decoder(make_spec(Sizes(), kernels, torch.float32))
    plain = Step([(9, 1, True)], [Draft()], False, True, (), StatesOf.NO_ROW)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    task = plain.task(texts_SL, filled_cache(Sizes(), torch.float32))

    def by_parts() -> StepRead:
        raise AssertionError("it was computed in parts")

    came = passes.step(task, by_parts)
    assert came.choice is not None
    assert came.choice.on_host is not None
    [[token_id]] = came.choice.on_host.emitted
    assert texts_SL[2, 10] == token_id
    assert came.states_RD is None


def test_a_step_reads_drafts_behind_the_parents_that_the_network_chose():
    """The second draft continues the root, so it stands where the first one does."""
    kernels = cpu_kernels(1)
    target = Target(kernels, kernels.compile_decoder(make_spec(Sizes(), kernels, torch.float32)))
    tree = Draft((7, 8, 9), (0, 0, 1))
    step = Step([(2, 1, True)], [tree], True, True, (), StatesOf.NO_ROW)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    task = step.task(texts_SL, filled_cache(Sizes(), torch.float32))
    rows = target.passes.step(task, lambda: read_by_parts(target, task)).place()
    assert rows.positions_T.tolist() == [2, 3, 3, 4]
    assert rows.ancestors_T.tolist() == [0, 0b001, 0b010, 0b101]


def test_logits_without_a_best_one_are_told():
    kernels = cpu_kernels(1)
    spec = make_spec(Sizes(), kernels, torch.float32)
    spec.embedding_VD[5] = torch.nan
    passes = kernels.compile_decoder(spec)
    step = Step([(0, 1, True), (0, 1, True)], [Draft(), Draft()], False, True, (), StatesOf.NO_ROW)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    texts_SL[2] = 5
    task = step.task(texts_SL, filled_cache(Sizes(), torch.float32))
    came = passes.step(task, lambda: pytest.fail("it was computed in parts"))
    assert came.choice is not None
    assert came.choice.on_host is not None
    assert came.choice.on_host.is_finite == [False, True]
