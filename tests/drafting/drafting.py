"""Requests that ask for drafts, and what each should get, alone and slowly."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.torch import noise
from tests.reference.processors import probabilities, processed_logits
from tests.sampling_batches import batch_of_params

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=5, presence_penalty=1.0),
    SamplingParams(temperature=1.3, top_p=0.7, logit_bias={3: 4.0}),
    SamplingParams(temperature=1.0, min_p=0.05, allowed_token_ids=list(range(0, 60, 2))),
]
SEEDS = [11, 12, 13, 14]
# Requests with a seed of their own draft with the target's noise, beside others that do not.
SEEDED: dict[str, Collection[int]] = {"none seeded": (), "all seeded": range(4), "two": (1, 3)}
NUM_STATE_ROWS, ROW_LEN = 6, 32

# (logits behind the newest token and these drafts) for each draft in turn
NextLogits = Callable[[Sequence[int]], Sequence[float]]


def sampling_batch(
    chosen: Sequence[int],
    vocab_size: int,
    device: str = "cpu",
    params: Sequence | None = None,
    seeded: Collection[int] = (),
) -> SamplingBatch:
    params = PARAMS if params is None else params
    return batch_of_params(
        [replace(params[i], seed=SEEDS[i]) if i in seeded else params[i] for i in chosen],
        seeds=[SEEDS[i] for i in chosen],
        vocab_size=vocab_size,
        device=device,
    )


def slow_drafts(
    next_logits: NextLogits, ask: DraftModelAsk, request: int, *, shares_noise: bool
) -> tuple[list[int], list[list[float]]]:
    """(ids, probabilities) of one request: each draft is chosen before the next one is thought of.

    Penalties are left to verification.
    """
    params = replace(PARAMS[request], presence_penalty=0.0)
    ids: list[int] = []
    probs: list[list[float]] = []
    for _ in range(ask.num_drafts):
        processed = processed_logits(next_logits(ids), params, [], [])
        scores = torch.tensor([processed])
        if not params.is_greedy:
            purpose = Purpose.SAMPLE if shares_noise else Purpose.DRAFT
            keys = NoiseKeys.of(
                torch.tensor([SEEDS[request]]),
                torch.tensor([ask.num_tokens + len(ids)]),
                purpose,
                None if shares_noise else torch.tensor([ask.num_tokens + (len(probs) << 24)]),
            )
            scores = scores + noise.gumbel(keys, len(processed))
        ids.append(int(scores.argmax()))
        probs.append(probabilities(processed))
    return ids, probs


def check_drafts(
    made: DraftBatch,
    asks: Sequence[DraftModelAsk],
    chosen: Sequence[int],
    next_logits: Sequence[NextLogits],
    *,
    seeded: Collection[int] = (),
    tolerance: float = 1e-5,
) -> None:
    """Every request's drafts are those that it gets alone."""
    most = max(ask.num_drafts for ask in asks)
    assert made.token_ids_BN.shape == (len(asks), most)
    assert made.is_chain
    assert torch.equal(made.parents_BN, torch.arange(most).expand(len(asks), -1))
    assert made.num_drafts_B.tolist() == [ask.num_drafts for ask in asks]
    is_sampled = [not PARAMS[request].is_greedy and request not in seeded for request in chosen]
    assert made.all_sampled == all(is_sampled)
    assert (made.probs_BNV is not None) == any(is_sampled)
    for row, (ask, request, logits) in enumerate(zip(asks, chosen, next_logits, strict=True)):
        ids, probs = slow_drafts(logits, ask, request, shares_noise=request in seeded)
        padding = [-1] * (most - ask.num_drafts)
        assert made.token_ids_BN[row].tolist() == ids + padding
        if made.probs_BNV is None or made.is_sampled_BN is None:
            continue
        assert (
            made.is_sampled_BN[row, : ask.num_drafts].tolist() == [is_sampled[row]] * ask.num_drafts
        )
        if is_sampled[row]:
            got = made.probs_BNV[row, : ask.num_drafts]
            assert got.dtype is torch.float32
            torch.testing.assert_close(got, torch.tensor(probs), rtol=0, atol=tolerance)


def texts(vocab_size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (NUM_STATE_ROWS, ROW_LEN), generator=generator)
