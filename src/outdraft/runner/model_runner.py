"""One step on the device: draft, target forward, verify, keep what was accepted.

`launch` issues everything and waits for nothing: sampled ids go from the verifier into the device
state, from where the next step's drafter and target read them. `collect` is the only place where
the host waits, once a step.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import Span, lay_out, send
from outdraft.core.plan import PhaseTimes, StepPlan, StepResult, Work
from outdraft.core.request import Request
from outdraft.kv.cache import KVCache
from outdraft.models.llama import CausalLM
from outdraft.runner.device_state import DeviceState, state_row
from outdraft.runner.drafts import draft_ask, host_drafts, with_model_drafts
from outdraft.runner.logprobs import LogprobRows, emitted_logprobs, prompt_logprobs
from outdraft.runner.results import StepCopies, to_host, work_results
from outdraft.runner.timing import PhaseClock
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors import Paths
from outdraft.spec.draft_batch import DraftBatch
from outdraft.spec.draft_model import DraftModelProposer
from outdraft.spec.rejection_sampler import Verifier
from outdraft.spec.verify import Verdict


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The target's forward pass over all rows of a step.

    Attributes:
        hidden_TD: hidden states of all rows.
        logit_hidden_RD: of the rows whose logits are needed: per sampling request its root, then
            its drafts.
        state_rows_B, num_tokens_B, prompt_lens_B: of the sampling requests, int64.
        draft_slots_BN: cache slots behind each root, int64; where drafts stand and where the
            accepted ones belong.
    """

    hidden_TD: Tensor
    logit_hidden_RD: Tensor
    state_rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor
    draft_slots_BN: Tensor


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched; its tensors may not be computed yet."""

    plan: StepPlan
    copies: StepCopies
    clock: PhaseClock


class ModelRunner:
    """Owns the target, its cache, the drafter if there is one, and the device's state."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        state: DeviceState,
        verifier: Verifier,
        drafter: DraftModelProposer | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.state = state
        self.verifier = verifier
        self.drafter = drafter
        self.device = state.token_ids_SL.device
        self._sampling: dict[tuple[Request, ...], SamplingBatch] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Issue a whole step and the copy of its results; waits for nothing."""
        clock = PhaseClock(self.device)
        self.state.admit([work.request for work in plan.works])
        works = [work for work in plan.works if work.samples]
        sampling = self._sampling_batch([work.request for work in works]) if works else None
        drafts = self._drafts(works, sampling) if sampling else None
        clock.mark("draft")
        target = self._forward(plan.works, drafts)
        prompt = prompt_logprobs(plan.works, target.hidden_TD, self.model)
        clock.mark("verify")
        verdict: Verdict | None = None
        emitted: LogprobRows | None = None
        if drafts is not None and sampling is not None:
            logits_RV = self.model.logits(target.logit_hidden_RD)
            paths = self._paths(works, target, sampling)
            verdict = self.verifier.verify(logits_RV, drafts, sampling, paths)
            self._keep(verdict, drafts, target)
            emitted = emitted_logprobs(works, logits_RV, drafts, verdict)
        clock.mark("sample")
        return PendingStep(plan, to_host(drafts, verdict, emitted, prompt, self.device), clock)

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step: the one host synchronisation of a step."""
        works = work_results(pending.plan, pending.copies)
        clock = pending.clock
        times = PhaseTimes(clock.seconds("draft"), clock.seconds("verify"), clock.seconds("sample"))
        return StepResult(works, times)

    def _sampling_batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """The requests' parameters on the device; kept while the same requests sample."""
        key = tuple(requests)
        batch = self._sampling.pop(key, None)
        if batch is None:
            batch = SamplingBatch.from_requests(
                [request.params for request in requests],
                seeds=[request.seed for request in requests],
                vocab_size=self.model.config.vocab_size,
                device=self.device,
                bad_words=[request.bad_words_ids for request in requests],
                stop_ids=[sorted(request.stop_token_ids) for request in requests],
            )
        # The whole batch and the part of it that the model drafts for.
        self._sampling = dict([*self._sampling.items(), (key, batch)][-2:])
        return batch

    def _drafts(self, works: Sequence[Work], sampling: SamplingBatch) -> DraftBatch:
        """The host's drafts, and those that the draft model makes now."""
        drafts = host_drafts(works, self.device)
        asked = [i for i, work in enumerate(works) if work.drafts and work.drafts.num_model_drafts]
        if not asked:
            return drafts
        assert self.drafter is not None
        if len(asked) < len(works):
            sampling = self._sampling_batch([works[i].request for i in asked])
        asks = [draft_ask(works[i]) for i in asked]
        made = self.drafter.propose(asks, self.state.token_ids_SL, sampling)
        keeps_probs = self.verifier.method != "drafter_invariant"
        return with_model_drafts(drafts, asked, made if keeps_probs else made.without_probs())

    def _forward(self, works: Sequence[Work], drafts: DraftBatch | None) -> TargetPass:
        block_size = self.cache.block_size
        parents = [_parents(work) for work in works]
        layout = lay_out(
            [
                Span(work.start, work.num_new, up, work.block_ids)
                for work, up in zip(works, parents, strict=True)
            ],
            block_size,
        )
        width = drafts.width if drafts is not None else 0
        starts = layout.query_start_B1
        rows_T = np.repeat([state_row(work.request) for work in works], np.diff(starts))
        # Where each row's token is: in the state for causal rows, in the drafts for drafted ones.
        state_index_T = rows_T * self.state.row_len + layout.positions_T
        draft_index_T = np.full(len(rows_T), -1, dtype=np.int64)
        logit_rows: list[np.ndarray] = []
        sampling: list[list[int]] = []
        draft_slots: list[np.ndarray] = []
        for b, work in enumerate(works):
            if not work.samples:
                continue
            root = int(starts[b]) + work.num_new - 1
            draft_index_T[root + 1 : starts[b + 1]] = (
                np.arange(work.num_drafts) + len(sampling) * width
            )
            logit_rows.append(np.arange(root, starts[b + 1], dtype=np.int64))
            slots = np.full(width, -1, dtype=np.int64)
            slots[: work.num_drafts] = layout.slots_T[root + 1 : starts[b + 1]]
            draft_slots.append(slots)
            request = work.request
            sampling.append([state_row(request), request.num_tokens, request.num_prompt])
        metadata, sent = send(
            layout,
            [
                np.where(draft_index_T < 0, state_index_T, 0),
                draft_index_T,
                np.concatenate(logit_rows) if logit_rows else np.zeros(0, dtype=np.int64),
                np.array(sampling, dtype=np.int64).reshape(-1, 3),
                np.array(draft_slots, dtype=np.int64).reshape(len(draft_slots), width),
            ],
            self.device,
        )
        state_index, draft_index, logit_rows_R, sampling_B3, draft_slots_BN = sent
        ids_T = self.state.token_ids_SL.view(-1)[state_index]
        if drafts is not None and width:
            drafted_T = drafts.token_ids_BN.reshape(-1)[draft_index.clamp_min(0)]
            ids_T = torch.where(draft_index >= 0, drafted_T, ids_T)
        hidden_TD = self.model(ids_T, metadata.positions_T, self.cache.layers, metadata)
        are_all = len(logit_rows_R) == len(hidden_TD)
        logit_hidden_RD = hidden_TD if are_all else hidden_TD[logit_rows_R]
        state_rows_B, num_tokens_B, prompt_lens_B = sampling_B3.unbind(1)
        return TargetPass(
            hidden_TD, logit_hidden_RD, state_rows_B, num_tokens_B, prompt_lens_B, draft_slots_BN
        )

    def _paths(self, works: Sequence[Work], target: TargetPass, sampling: SamplingBatch) -> Paths:
        history_BL = None
        if sampling.needs_history:
            longest = max(work.request.num_tokens for work in works)
            history_BL = self.state.token_ids_SL[target.state_rows_B, :longest]
            places_L = torch.arange(longest, device=self.device)
            past_BL = places_L >= target.num_tokens_B[:, None]
            history_BL = history_BL.masked_fill(past_BL, -1)
        return Paths(history_BL, target.prompt_lens_B, target.num_tokens_B, None)

    def _keep(self, verdict: Verdict, drafts: DraftBatch, target: TargetPass) -> None:
        """Write the emitted tokens to the texts, and accepted branches to where texts are read."""
        self.state.append(target.state_rows_B, target.num_tokens_B, verdict.token_ids_BN1)
        if drafts.is_chain:
            return  # accepted rows stand where they belong
        source_BN = target.draft_slots_BN.gather(1, verdict.rows_BN.clamp_min(0))
        source_BN = source_BN.masked_fill(verdict.rows_BN < 0, -1)
        self.cache.compact(source_BN.flatten(), target.draft_slots_BN.flatten())


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; what the model drafts is a chain."""
    if work.drafts is None:
        return ()
    return work.drafts.draft.parents or range(work.drafts.num_model_drafts)
