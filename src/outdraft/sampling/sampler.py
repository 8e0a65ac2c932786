"""Choose tokens from processed logits: the argmax, or a sample by the Gumbel-max trick.

argmax(logits + Gumbel noise) is a sample of softmax(logits), and a pure function of the noise's
key: the same token in any batch.

Dimension key: R rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from outdraft.sampling import noise, sampler_cpu
from outdraft.sampling.noise import Purpose
from outdraft.sampling.row_kernels import is_compiled_for


def choose(
    processed_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_greedy_R: Tensor,
    purpose: Tensor | Purpose,
    *,
    all_greedy: bool,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """int64 [R]: the argmax of greedy rows, a sample of the others; the lowest id of a tie.

    Args:
        positions_R: int64 text positions of the tokens to be chosen.
        purpose: of all rows, or int64 [R].
        all_greedy: known on the host: no noise is needed.
        anchors_R: committed tokens when the step began; required for Purpose.DRAFT, 0 in rows of
            Purpose.SAMPLE.
    """
    if all_greedy:
        return processed_RV.argmax(1)
    _check(purpose, anchors_R)
    if is_compiled_for(processed_RV):
        ids_R = np.empty(len(processed_RV), dtype=np.int64)
        keys = _keys_cpu(processed_RV, seeds_R, positions_R, is_greedy_R, purpose, anchors_R)
        sampler_cpu.choose_rows(*keys, ids_R)
        return torch.from_numpy(ids_R)
    best_R = processed_RV.argmax(1)
    sampled_R = noise.sample_gumbel(processed_RV, seeds_R, positions_R, purpose, anchors_R)
    return torch.where(is_greedy_R, best_R, sampled_R)


def sample_with_probs(
    processed_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_greedy_R: Tensor,
    purpose: Tensor | Purpose,
    *,
    all_greedy: bool,
    anchors_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ids of `choose`, and float32 [R, V] what they were drawn from.

    For a proposer. The probabilities of greedy rows are not one-hot: their drafts are
    deterministic, and verification does not read these rows.
    """
    if is_compiled_for(processed_RV) and not all_greedy:
        _check(purpose, anchors_R)
        ids_R = np.empty(len(processed_RV), dtype=np.int64)
        probs_RV = np.empty(processed_RV.shape, dtype=np.float32)
        keys = _keys_cpu(processed_RV, seeds_R, positions_R, is_greedy_R, purpose, anchors_R)
        sampler_cpu.choose_rows_with_probs(*keys, ids_R, probs_RV)
        return torch.from_numpy(ids_R), torch.from_numpy(probs_RV)
    chosen_R = choose(
        processed_RV,
        seeds_R,
        positions_R,
        is_greedy_R,
        purpose,
        all_greedy=all_greedy,
        anchors_R=anchors_R,
    )
    return chosen_R, torch.softmax(processed_RV, dim=1, dtype=torch.float32)


def _check(purpose: Tensor | Purpose, anchors_R: Tensor | None) -> None:
    if anchors_R is not None or purpose is Purpose.SAMPLE or purpose is Purpose.RECOVER:
        return
    name = purpose.name if isinstance(purpose, Purpose) else "of each row"
    raise ValueError(f"noise of purpose {name} needs anchors")


def _keys_cpu(
    processed_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_greedy_R: Tensor,
    purpose: Tensor | Purpose,
    anchors_R: Tensor | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, seeds, positions, anchors, is_greedy and purposes for the kernels."""
    return (
        processed_RV.contiguous().numpy(),
        np.ascontiguousarray(seeds_R.numpy()),
        np.ascontiguousarray(positions_R.numpy()),
        np.zeros(len(seeds_R), np.int64)
        if anchors_R is None
        else np.ascontiguousarray(anchors_R.numpy()),
        np.ascontiguousarray(is_greedy_R.numpy()),
        np.ascontiguousarray(purpose.numpy())
        if isinstance(purpose, Tensor)
        else np.full(len(seeds_R), int(purpose)),
    )
