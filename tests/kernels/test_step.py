"""Steps in one call: bit for bit what the parts make, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.core.draft import Draft
from outdraft.core.plan import TokenRules
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import ALONE
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.data import logits
from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.decoder_ops import (
    DecoderPass,
    StatesOf,
    StepRead,
    StepTask,
)
from outdraft.kernels.ops import Kernels
from outdraft.kv.cache import KVCache, LayerCache
from outdraft.runner.step_rows import read_by_parts
from outdraft.verification.verifier import Verifier
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
METHODS = {Rule.MATCH: "drafter_invariant", Rule.TOKEN: "token", Rule.TRAVERSAL: "block"}
LAST = len(Sizes().windows)  # what is tapped behind the last layer is of all rows


@dataclass
class Target:
    """What `read_by_parts` asks of a model."""

    kernels: Kernels
    passes: DecoderPass
    vocabulary = VocabularyShard(ALONE, NUM_TOKENS)

    @classmethod
    def of(cls, kernels: Kernels, dtype: torch.dtype = torch.float32) -> "Target":
        return cls(kernels, kernels.compile_decoder(make_spec(Sizes(), kernels, dtype)))

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

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return self.passes.logits(hidden_RD)

    def in_one_call(self, task: StepTask) -> StepRead:
        assert self.passes.fused is not None
        read = self.passes.fused.step(task)
        assert read is not None, "it is computed in parts"
        return read

    def parts(self, task: StepTask) -> StepRead:
        return read_by_parts(self, Verifier(self.kernels, METHODS[rule_of(task)]), task)


def rule_of(task: StepTask) -> Rule:
    return Rule.MATCH if task.rule is None else task.rule


@dataclass
class Step:
    """The works of a step: what of the texts in rows 2, 0, 1 is read, and their drafts.

    Attributes:
        reads: tokens before the rows, rows of the text, whether it samples.
        drafts, rules: of those that sample.
        rule: None: nothing is chosen.
        draws: drafts were drawn.
    """

    reads: list[tuple[int, int, bool]]
    drafts: list[Draft]
    rules: list[TokenRules]
    rule: Rule | None
    are_shaped: bool = False
    draws: bool = False
    taps: tuple[int, ...] = ()
    states_of: StatesOf = StatesOf.NO_ROW
    window: int = 0

    def task(self, texts_SL: Tensor, cache: KVCache) -> StepTask:
        left = list(self.drafts)
        spans, rows, lengths, prompts = [], [], [], []
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
                prompts.append((context_len + num_causal) // 2)
        return StepTask(
            spans,
            (rows, lengths, prompts),
            texts_SL,
            self.batch() if self.drafts else None,
            self.are_shaped,
            cache.layers,
            BLOCK_SIZE,
            self.taps,
            self.rule,
            self.sampling(),
            self.states_of,
            self.window,
        )

    def batch(self) -> DraftBatch:
        batch = DraftBatch.from_drafts(self.drafts, CPU)
        if not self.draws:
            return batch
        generator = torch.Generator().manual_seed(2)
        logits_BNV = torch.randn(*batch.token_ids_BN.shape, NUM_TOKENS, generator=generator)
        return replace(
            batch,
            probs_BNV=(2 * logits_BNV).softmax(2),
            is_sampled_BN=batch.is_draft_BN.clone(),
            sampled_trees=not batch.is_chain,
        )

    def sampling(self) -> SamplingBatch | None:
        if self.rule is None:
            return None
        return SamplingBatch.from_rules(self.rules, vocab_size=NUM_TOKENS, device=CPU)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    sizes = st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans())
    reads = draw(st.lists(sizes, min_size=1, max_size=3))
    drafts, rules = [], []
    for _, _, samples in reads:
        if samples:
            number = draw(st.integers(0, 7))
            ids = tuple(draw(st.integers(0, NUM_TOKENS - 1)) for _ in range(number))
            drafts.append(Draft(ids, tuple(draw(st.integers(0, row)) for row in range(number))))
            rules.append(draw(ways_to_choose()))
    rule = draw(st.sampled_from([None, *METHODS])) if drafts else None
    taps = draw(st.sampled_from([(), (0,), (1, 0), (LAST,)]))
    least = StatesOf.NO_ROW if rule is not None and not taps else StatesOf.ROWS_WITH_LOGITS
    states_of = draw(st.sampled_from([one for one in StatesOf if one >= least]))
    has_drafts = any(map(len, drafts))
    are_shaped, draws = (has_drafts and draw(st.booleans()) for _ in range(2))
    window = draw(st.sampled_from([0, 9, 16]))
    return Step(reads, drafts, rules, rule, are_shaped, draws, taps, states_of, window)


@st.composite
def ways_to_choose(draw: st.DrawFn) -> TokenRules:
    seed = draw(st.integers(0, 99))
    params = SamplingParams(
        seed=seed if draw(st.booleans()) else None,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    return TokenRules(params, seed)


def read(step: Step, target: Target, dtype: torch.dtype, *, in_parts: bool) -> list[Tensor]:
    """All that came of a step, and the texts and the cache behind it."""
    generator = torch.Generator().manual_seed(1)
    texts_SL = torch.randint(NUM_TOKENS, (3, ROW_LEN), generator=generator)
    cache = filled_cache(Sizes(), dtype)
    task = step.task(texts_SL, cache)

    came = target.parts(task) if in_parts else target.in_one_call(task)
    rows = came.place()
    results = [texts_SL[:, :-1]]  # the last column takes writes that must go nowhere
    results += [getattr(rows, name) for name in ("state_index_T", "draft_index_T", "root_rows_B")]
    results += [rows.logit_rows_R, rows.draft_slots_BN, rows.positions_T]
    results += [rows.ancestors_T, rows.slots_T, *rows.extra]
    if step.states_of is not StatesOf.NO_ROW:
        assert came.states_RD is not None
        assert came.tapped_TKD is not None
        results += [came.states_RD, came.tapped_TKD]
    if step.rule is not None:
        assert came.choice is not None
        verdict = came.choice.verdict
        results += [verdict.token_ids_BN1, verdict.num_emitted_B, verdict.rows_BN]
        results.append(came.choice.is_finite_R)
        assert (came.kept is not None) == (step.window > 0)
        results += came.kept or ()
    return [*results, *(x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE))]


@pytest.mark.slow
@each_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@given(step=steps())
def test_a_step_in_one_call_is_what_its_parts_make(name, dtype, step):
    target = Target.of(cpu_kernels(1, name), dtype)
    got, want = (read(step, target, dtype, in_parts=parts) for parts in (False, True))
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_states_are_kept_of_what_became_part_of_a_text():
    """A window of four has room for four of five tokens, and a draft that is accepted."""
    target, rules = Target.of(cpu_kernels(1)), TokenRules(SamplingParams(), seed=3)
    cache = filled_cache(Sizes(), torch.float32)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    first = Step([(4, 5, True)], [Draft()], [rules], Rule.MATCH)
    came = target.in_one_call(first.task(texts_SL.clone(), cache))
    best = came.choice.verdict.token_ids_BN1[0, 0].item()
    drafts = [Draft(((best + 1) % NUM_TOKENS, best), (0, 0))]
    step = Step([(4, 5, True)], drafts, [rules], Rule.MATCH, window=4)
    kept = target.in_one_call(step.task(texts_SL, cache)).kept
    # In row 2 of the texts: tokens 4 to 8, then the refused draft and the accepted one, token 9.
    assert kept.places_T.tolist() == [-1, 9, 10, 11, 8, -1, 9]
    assert kept.last_rows_W.tolist() == [6]
    assert kept.last_places_W.tolist() == [9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_written_to_its_text_and_known_to_the_host(temperature):
    target, params = Target.of(cpu_kernels(1)), SamplingParams(temperature=temperature)
    rules = TokenRules(params, seed=3)
    plain = Step([(9, 1, True)], [Draft()], [rules], Rule.MATCH)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    task = plain.task(texts_SL, filled_cache(Sizes(), torch.float32))
    came = target.in_one_call(task)
    assert came.choice is not None
    [[token_id]] = came.choice.verdict.token_ids_BN1.tolist()
    assert texts_SL[2, 10] == token_id
    assert came.states_RD is None


@pytest.mark.parametrize(("temperature", "in_parts"), [(0.0, False), (1.0, True)])
def test_memory_for_very_many_logits_is_not_kept(temperature, in_parts, monkeypatch):
    """The likeliest tokens are found a few rows at a time. Here a part has one row."""
    monkeypatch.setattr(logits, "PART_BYTES", 4 * NUM_TOKENS)
    target, params = Target.of(cpu_kernels(1)), SamplingParams(temperature=temperature)
    rules = TokenRules(params, seed=3)
    step = Step([(9, 1, True)], [Draft((5,), (0,))], [rules], Rule.MATCH)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    task = step.task(texts_SL, filled_cache(Sizes(), torch.float32))
    assert target.passes.fused is not None
    assert (target.passes.fused.step(task) is None) is in_parts


def test_a_step_reads_drafts_behind_the_parents_that_the_network_chose():
    """The second draft continues the root, so it stands where the first one does."""
    target, tree = Target.of(cpu_kernels(1)), Draft((7, 8, 9), (0, 0, 1))
    step = Step(
        [(2, 1, True)], [tree], [TokenRules(SamplingParams(), seed=0)], Rule.MATCH, are_shaped=True
    )
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    task = step.task(texts_SL, filled_cache(Sizes(), torch.float32))
    rows = target.in_one_call(task).place()
    assert rows.positions_T.tolist() == [2, 3, 3, 4]
    assert rows.ancestors_T.tolist() == [0, 0b001, 0b010, 0b101]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_best_one_are_told(temperature):
    kernels = cpu_kernels(1)
    spec = make_spec(Sizes(), kernels, torch.float32)
    spec.embedding.source[5] = torch.nan
    target = Target(kernels, kernels.compile_decoder(spec))
    rules = [TokenRules(SamplingParams(temperature=temperature), seed=0)] * 2
    step = Step([(0, 1, True), (0, 1, True)], [Draft(), Draft()], rules, Rule.MATCH)
    texts_SL = torch.zeros(3, ROW_LEN, dtype=torch.int64)
    texts_SL[2] = 5
    came = target.in_one_call(step.task(texts_SL, filled_cache(Sizes(), torch.float32)))
    assert came.choice is not None
    assert came.choice.is_finite_R.tolist() == [False, True]
