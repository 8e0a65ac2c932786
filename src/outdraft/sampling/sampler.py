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
    if all_greedy:
        return processed_RV.argmax(1)
    if purpose in (Purpose.DRAFT, Purpose.ACCEPT) and anchors_R is None:
        raise ValueError(f"noise of purpose {purpose.name} needs anchors")
    noise_RV = noise.gumbel(seeds_R, positions_R, purpose, processed_RV.shape[1], anchors_R)
    noise_RV.masked_fill_(is_greedy_R[:, None], 0.0)
    return (processed_RV + noise_RV).argmax(1)


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
