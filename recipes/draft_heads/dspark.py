"""DSpark (arXiv 2607.05147): a DFlash head that knows the token before each draft.

A head of token pairs adds logits that depend on the token before a draft, so that drafts are drawn
one after the other behind one pass; training takes the text's own tokens. Another head says from
the row of a draft, and from the token before it, how likely the draft is accepted. It learns beside
the others and changes nothing of them.

Dimension key: as in dflash.py; M rank of the head of pairs.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from dflash import DFlash, dflash_config
from target_states import TargetStates
from torch import Tensor, nn
from transformers import LlamaForCausalLM

PAIR_RANK = 64
INTERMEDIATE = 640  # with the pairs, a file is as large as DFlash's


class PairHead(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, rank = config["vocab_size"], config["markov_rank"]
        self.markov_w1 = nn.Embedding(size, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)  # at first nothing is added


class ConfidenceHead(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(config["hidden_size"] + config["markov_rank"], 1)


class DSpark(DFlash):
    """The head, with the tensor names of the checkpoints that DSpark's authors publish."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.markov_head, self.confidence_head = PairHead(config), ConfidenceHead(config)

    @staticmethod
    def config_for(target: LlamaForCausalLM) -> dict[str, Any]:
        return as_spark(dflash_config(target))

    def forward(
        self,
        states: TargetStates,
        ids_BL: Tensor,
        num_drafts: int,
        roots_R: Tensor | None = None,
    ) -> list[Tensor]:
        """As DFlash's, behind the text's own tokens."""
        if roots_R is None:
            roots_R = torch.arange(ids_BL.shape[1] - num_drafts)
        return self.drafts(states, ids_BL, num_drafts, roots_R)[0]

    def drafts(
        self, states: TargetStates, ids_BL: Tensor, num_drafts: int, roots_R: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [B, R, V] of each draft, and log-odds [B, R] that it is accepted."""
        hidden = self.block_states(states, ids_BL, roots_R)
        logits, odds = [], []
        for draft in range(num_drafts):
            before = self.markov_head.markov_w1(ids_BL[:, roots_R + 1 + draft])
            rows = hidden[:, :, draft]
            logits.append(F.linear(rows, states.lm_head) + self.markov_head.markov_w2(before))
            told = self.confidence_head.proj(torch.cat([rows, before], dim=-1).detach())
            odds.append(told[..., 0])
        return logits, odds

    @classmethod
    def from_dflash(cls, trained: DFlash) -> Self:
        """A head to train on: it drafts as `trained`, but for the numbers of its feed-forward
        blocks that weigh least."""
        head = cls(as_spark(trained.config))
        kept = head.config["intermediate_size"]
        tensors = dict(trained.state_dict())
        for index, layer in enumerate(trained.layers):
            mlp = layer.mlp
            norms = [mlp.gate_proj.weight.norm(dim=1), mlp.up_proj.weight.norm(dim=1)]
            worth = norms[0] * norms[1] * mlp.down_proj.weight.norm(dim=0)
            best = worth.topk(kept).indices.sort().values
            for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
                key = f"layers.{index}.mlp.{name}.weight"
                tensors[key] = tensors[key].index_select(dim, best)
        left = head.load_state_dict(tensors, strict=False)
        assert not left.unexpected_keys
        return head


def as_spark(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head like one of DFlash."""
    return config | {
        "architectures": ["DSparkDraftModel"],
        "intermediate_size": min(INTERMEDIATE, config["intermediate_size"]),
        "markov_rank": PAIR_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
