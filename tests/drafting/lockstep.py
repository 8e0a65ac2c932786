"""Many requests that decode side by side, from tables instead of models.

The target and the proposer are tables of logits by last token, over 8 tokens. Thousands of
requests that differ in their seed alone decode in lockstep until each has three tokens. Their
joint counts must fit the exact joint, which the slow twins of the processors give.
"""

from dataclasses import replace

import numpy as np
import torch
from scipy import stats

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.sampling.processors import process_logits
from outdraft.verification.verifier import Verifier
from tests.kernels.tables import draw_tokens, kernels_for
from tests.reference.processors import probabilities, processed_logits
from tests.reference.verification import joint
from tests.sampling_batches import batch_of_params

VOCAB, LENGTH, ALPHA = 8, 3, 1e-6
PROMPT = [5, 1]
BAD_WORDS, STOP_IDS = [[3, 2], [6]], [7]
PLAIN = SamplingParams(temperature=1.0)
ALL = SamplingParams(
    temperature=0.75,
    top_k=6,
    top_p=0.9375,
    min_p=0.015625,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.25,
    logit_bias={0: 0.5, 4: -0.25},
    allowed_token_ids=[0, 1, 2, 3, 4, 6, 7],
    min_tokens=2,
)


def tables():
    """Target and proposer logits [last token, next token]."""
    rng = np.random.default_rng(8)
    target = rng.normal(size=(VOCAB, VOCAB)) * 1.2
    return torch.tensor(target).float(), torch.tensor(
        target + rng.normal(size=target.shape)
    ).float()


TARGET, PROPOSER = tables()


class Decoding:
    """Requests decoded in lockstep; every step drafts with `draft` and verifies."""

    def __init__(self, params, num_requests, method="block", anchored=True):
        self.num_requests, self.kernels = num_requests, kernels_for(TARGET.dtype)
        self.verifier = Verifier(self.kernels, method)
        self.anchored = anchored
        self.sampling = batch_of_params(
            [params] * num_requests,
            shares_noise=method == "drafter_invariant",
            seeds=list(range(7, 7 + num_requests)),
            vocab_size=VOCAB,
            device="cpu",
            bad_words=[BAD_WORDS if params is ALL else []] * num_requests,
            stop_ids=[STOP_IDS] * num_requests,
        )
        self.text_BL = torch.full((num_requests, len(PROMPT) + 40), -1)
        self.text_BL[:, : len(PROMPT)] = torch.tensor(PROMPT)
        self.num_tokens_B = torch.full((num_requests,), len(PROMPT))
        self.num_drafts = self.num_accepted = 0

    @property
    def committed(self):
        prompt_lens_B = torch.full_like(self.num_tokens_B, len(PROMPT))
        return Paths(self.text_BL, prompt_lens_B, self.num_tokens_B, None)

    @property
    def root_B(self):
        return self.text_BL.gather(1, self.num_tokens_B[:, None] - 1)[:, 0]

    def sampled_chains(self, length):
        """Drafts drawn from the proposer's processed distribution."""
        every_B = torch.arange(self.num_requests)
        path_BK = torch.full((self.num_requests, length), -1)
        last_B, probs = self.root_B, []
        for step in range(length):
            processed_BV = process_logits(
                self.kernels,
                PROPOSER.to(TARGET.dtype)[last_B],
                every_B,
                replace(self.committed, path_ids_RK=path_BK),
                self.sampling,
            )
            anchors_B = self.num_tokens_B if self.anchored else torch.zeros_like(self.num_tokens_B)
            shares_B = self.sampling.shares_noise_B
            purpose_B = torch.where(shares_B, int(Purpose.SAMPLE), int(Purpose.DRAFT))
            anchors_B = anchors_B.masked_fill(shares_B, 0)
            last_B, probs_BV = draw_tokens(
                self.kernels,
                processed_BV,
                NoiseKeys(self.sampling.seeds_B, self.num_tokens_B + step, purpose_B, anchors_B),
                self.sampling.is_greedy_B,
            )
            path_BK[:, step] = last_B
            probs.append(probs_BV)
        chains = DraftBatch.from_drafts([Draft.chain(range(length))] * self.num_requests, "cpu")
        return replace(
            chains,
            token_ids_BN=path_BK,
            probs_BNV=torch.stack(probs, 1),
            is_sampled_BN=torch.ones_like(path_BK, dtype=torch.bool),
            all_sampled=True,
        )

    def target_rows(self, drafts):
        """Raw logits of the flat rows; all requests have the same number of drafts."""
        last_BN1 = torch.cat([self.root_B[:, None], drafts.token_ids_BN], 1)
        is_row_BN1 = torch.arange(drafts.width + 1) <= drafts.num_drafts_B[:, None]
        return TARGET[last_BN1[is_row_BN1]]

    def step(self, drafts):
        verdict = self.verifier.verify(
            self.target_rows(drafts), drafts, self.sampling, self.committed
        )
        for place in range(drafts.width + 1):
            is_emitted_B = place < verdict.num_emitted_B
            at_B1 = (self.num_tokens_B + place)[:, None]
            old_B1 = self.text_BL.gather(1, at_B1)
            new_B1 = torch.where(
                is_emitted_B[:, None], verdict.token_ids_BN1[:, place : place + 1], old_B1
            )
            self.text_BL.scatter_(1, at_B1, new_B1)
        self.num_tokens_B = self.num_tokens_B + verdict.num_emitted_B
        self.num_drafts += int(drafts.num_drafts_B.sum())
        self.num_accepted += int((verdict.rows_BN >= 0).sum())
        return verdict

    def run(self, draft):
        while int(self.num_tokens_B.min()) < len(PROMPT) + LENGTH:
            self.step(draft(self))
        return self.text_BL[:, len(PROMPT) : len(PROMPT) + LENGTH]


def exact_joint(params):
    def model(prefix):
        last = [*PROMPT, *prefix][-1]
        return probabilities(
            processed_logits(
                TARGET[last].tolist(),
                params,
                PROMPT,
                list(prefix),
                bad_words=BAD_WORDS if params is ALL else (),
                stop_ids=STOP_IDS,
            )
        )

    return joint(model, LENGTH)


def p_value(ids_BL, want):
    """G-test of joint counts; `want` is {ids: share}, and -1 in `ids_BL` is padding."""
    cells = {sequence: at for at, sequence in enumerate(want)}
    rows, numbers = np.unique(ids_BL.numpy(), axis=0, return_counts=True)
    counts = np.zeros(len(want))
    for row, number in zip(rows.tolist(), numbers, strict=True):
        sequence = tuple(token for token in row if token >= 0)
        assert sequence in cells, "a token outside the support"
        counts[cells[sequence]] = number
    return goodness_of_fit(counts, np.array(list(want.values()), dtype=np.float64) * len(ids_BL))


def goodness_of_fit(counts, expected):
    """p-value of the G-test; outcomes expected less than 5 times are one cell."""
    is_rare = expected < 5
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    live = expected > 0
    observed, expected = counts[live], expected[live] / expected.sum() * counts.sum()
    return stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue
