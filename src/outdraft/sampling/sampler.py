"""Choose tokens from processed logits: the argmax, or a sample by the Gumbel-max trick.

argmax(logits + Gumbel noise) is a sample of softmax(logits), and a pure function of the noise's
key: the same token in any batch.

Dimension key: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from outdraft.sampling import noise
from outdraft.sampling.noise import Purpose


def choose(
    processed_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_greedy_R: Tensor,
    purpose: Purpose,
    *,
    all_greedy: bool,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """int64 [R]: the argmax of greedy rows, a sample of the others; the lowest id of a tie.

    Args:
        positions_R: int64 text positions of the tokens to be chosen.
        all_greedy: known on the host: no noise is needed.
        anchors_R: committed tokens when the step began; required for Purpose.DRAFT.
    """
    best_R = processed_RV.argmax(1)
    if all_greedy:
        return best_R
    if purpose in (Purpose.DRAFT, Purpose.ACCEPT) and anchors_R is None:
        raise ValueError(f"noise of purpose {purpose.name} needs anchors")
    sampled_R = noise.sample_gumbel(processed_RV, seeds_R, positions_R, purpose, anchors_R)
    return torch.where(is_greedy_R, best_R, sampled_R)


def sample_with_probs(
    processed_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_greedy_R: Tensor,
    purpose: Purpose,
    *,
    all_greedy: bool,
    anchors_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ids of `choose`, and float32 [R, V] what they were drawn from.

    For a proposer. The probabilities of greedy rows are not one-hot: their drafts are
    deterministic, and verification does not read these rows.
    """
    ids_R = choose(
        processed_RV,
        seeds_R,
        positions_R,
        is_greedy_R,
        purpose,
        all_greedy=all_greedy,
        anchors_R=anchors_R,
    )
    return ids_R, torch.softmax(processed_RV, dim=1, dtype=torch.float32)
