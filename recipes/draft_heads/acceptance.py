"""What a draft head is worth: the acceptance of its chains, on text that the target wrote.

Dimension key: B sequences, L tokens in each, R roots of chains, S drafts of a chain, T tokens to
emit after the first, V the target's vocabulary, N the draft vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from dflash import DFlash
from target_states import TargetStates, target_states
from torch import Tensor, nn
from transformers import LlamaForCausalLM


class DraftHead(Protocol):
    """A root i of a chain is a place whose states are known; its drafts begin at token i + 2."""

    draft_ids: Tensor | None  # [N] int64, the target's names of the logits; None: all, in order

    def __call__(self, states: TargetStates, ids_BL: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [B, R, N] of each draft, when the text's own tokens are the drafts before it."""
        ...


def draft_loss(logits_BRN: Tensor, wanted_BRN: Tensor, overlap_share: float) -> Tensor:
    """Mean over places of a mixture of cross-entropy and of the chance that a draft is rejected.

    `wanted` holds the target's probabilities of the draft vocabulary, not renormalised: places
    where the target wants other tokens count for less. The chance of rejection, at temperature 1,
    is 1 - sum min(p, q); it alone teaches little while the two hardly overlap.
    """
    log_drafted = logits_BRN.log_softmax(-1)
    cross_entropy = -(wanted_BRN * log_drafted).sum(-1).mean()
    if overlap_share == 0:
        return cross_entropy
    rejected = 1 - torch.minimum(wanted_BRN, log_drafted.exp()).sum(-1).mean()
    return (1 - overlap_share) * cross_entropy + overlap_share * rejected


def confidence_loss(odds_BR: Tensor, logits_BRN: Tensor, wanted_BRN: Tensor) -> Tensor:
    """Cross-entropy of told log-odds with the chance that a drawn draft is accepted."""
    accepted = torch.minimum(wanted_BRN, logits_BRN.detach().softmax(-1)).sum(-1)
    return F.binary_cross_entropy_with_logits(odds_BR.float(), accepted)


def acceptance_length(accept_BTS: Tensor) -> float:
    """Tokens emitted per verification step, the recovered or bonus token included.

    accept_BTS[b, t, s] is the chance that draft s of a chain whose first draft is for token t is
    accepted, given that those before it are: 0 or 1 with greedy verification, min(1, q / p) of the
    text's token with rejection sampling (given the text that comes out, drafts are accepted
    independently with just that chance). A chain is not longer than the text.
    """
    num_tokens, num_drafts = accept_BTS.shape[1:]
    ends = torch.arange(num_tokens)[:, None] + torch.arange(num_drafts) >= num_tokens
    reach = accept_BTS.double().masked_fill(ends, 0).cumprod(-1)
    reach = F.pad(F.pad(reach, (1, 0), value=1.0), (0, 1))  # at least 0, 1, ..., S + 1 accepted
    exactly = reach[..., :-1] - reach[..., 1:]
    steps = torch.zeros(len(accept_BTS), num_tokens + num_drafts + 1, dtype=torch.float64)
    for token in reversed(range(num_tokens)):
        after = steps[:, token + 1 : token + 2 + num_drafts]
        steps[:, token] = 1 + (exactly[:, token] * after).sum(-1)
    return accept_BTS.shape[:2].numel() / steps[:, 0].sum().item()


def over_vocabulary(head: DraftHead, logits_BRN: Tensor, vocab_size: int) -> Tensor:
    """The head's probabilities [B, R, V]: zero for a token that it has no name for."""
    drafted = logits_BRN.softmax(-1)
    if head.draft_ids is None:
        return drafted
    zeros = drafted.new_zeros(*drafted.shape[:2], vocab_size)
    return zeros.index_copy(-1, head.draft_ids, drafted)


class Judge:
    """Texts that the target wrote after prompts of one length, and what it thought meanwhile."""

    def __init__(
        self, target: LlamaForCausalLM, texts_BL: Tensor, prompt_length: int, num_drafts: int
    ) -> None:
        self.num_drafts = num_drafts
        # The chains of the last roots reach past the text: nothing there is ever counted.
        self.ids = F.pad(texts_BL, (0, num_drafts))
        self.states = target_states(target, self.ids)
        self.num_tokens = texts_BL.shape[1] - prompt_length - 1
        self.first = prompt_length - 1  # the root that drafts for the token behind the first

    @torch.no_grad()
    def accept_chances(self, head: DraftHead) -> dict[str, Tensor]:
        """The chance of each draft given those before it, [B, T, S]; names as in `measure`."""
        roots = slice(self.first, self.first + self.num_tokens)
        greedy, sampled, overlap = [], [], []
        for step, logits in enumerate(self._logits(head, roots)):
            drafted = over_vocabulary(head, logits, self.states.logits.shape[-1])
            begin = self.first + 1 + step
            wanted = self.states.logits[:, begin : begin + self.num_tokens].softmax(-1)
            text = self.ids[:, begin + 1 : begin + 1 + self.num_tokens, None]
            greedy.append((drafted.argmax(-1, keepdim=True) == text)[..., 0].float())
            ratio = drafted.gather(-1, text) / wanted.gather(-1, text)
            sampled.append(ratio[..., 0].clamp(max=1))
            overlap.append(torch.minimum(drafted, wanted).sum(-1))
        return {
            "greedy": torch.stack(greedy, -1),
            "sampled": torch.stack(sampled, -1),
            "overlap": torch.stack(overlap, -1),
        }

    def _logits(self, head: DraftHead, roots: slice) -> list[Tensor]:
        """[B, R, N] of each draft from these roots. Only blocks do without the others."""
        if isinstance(head, DFlash):
            roots_R = torch.arange(roots.start, roots.stop)
            return head(self.states, self.ids, self.num_drafts, roots_R)
        return [logits[:, roots] for logits in head(self.states, self.ids, self.num_drafts)]


def measure(head: nn.Module, greedy: Judge, sampled: Judge) -> dict[str, float | list[float]]:
    """Acceptance lengths, and the acceptance rate of each draft if those before it are right."""
    greedy_chances, sampled_chances = greedy.accept_chances(head), sampled.accept_chances(head)
    return {
        "greedy_acceptance_length": round(acceptance_length(greedy_chances["greedy"]), 3),
        "sampled_acceptance_length": round(acceptance_length(sampled_chances["sampled"]), 3),
        "greedy_rates": [round(x, 3) for x in greedy_chances["greedy"].mean((0, 1)).tolist()],
        "sampled_rates": [round(x, 3) for x in sampled_chances["overlap"].mean((0, 1)).tolist()],
    }
