"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads that each predict one more token ahead.

All heads read the target's last hidden state h_i, behind the final norm, and nothing of the tokens
drafted before theirs: head s predicts token i + 2 + s (the target itself predicts token i + 1).

Dimension key: B sequences, L tokens in each, R roots, V vocabulary.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from target_states import TargetStates
from torch import Tensor, nn
from transformers import LlamaForCausalLM

NUM_HEADS = 4


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), once for each layer."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(nn.Module):
    """The heads, with the tensor names of vLLM's safetensors checkpoints."""

    draft_ids = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, vocabulary, heads = (
            config["hidden_size"],
            config["vocab_size"],
            config["num_heads"],
        )
        self.blocks = nn.ModuleList(
            [ResidualBlock(hidden, config["num_hidden_layers"]) for _ in range(heads)]
        )
        self.lm_heads = nn.ModuleList(
            [nn.Linear(hidden, vocabulary, bias=False) for _ in range(heads)]
        )

    def forward(self, states: TargetStates, ids_BL: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [B, R, V] of each draft, from every root 0..R-1, R = L - num_drafts."""
        hidden = states.hidden[:, : ids_BL.shape[1] - num_drafts]
        pairs = list(zip(self.blocks, self.lm_heads, strict=True))[:num_drafts]
        return [lm_head(block(hidden)) for block, lm_head in pairs]

    @classmethod
    def from_target(cls, target: LlamaForCausalLM) -> Self:
        """Heads to train; each begins as the target's own head."""
        head = cls(
            {
                "architectures": ["MedusaModel"],
                "model_type": "medusa",
                "hidden_size": target.config.hidden_size,
                "vocab_size": target.config.vocab_size,
                "num_heads": NUM_HEADS,
                "num_hidden_layers": 1,
                "medusa_fc_bias": True,
                "torch_dtype": "bfloat16",
            }
        )
        with torch.no_grad():
            for block, lm_head in zip(head.blocks, head.lm_heads, strict=True):
                for layer in block.layers:
                    layer.weight.zero_()
                    layer.bias.zero_()
                lm_head.weight.copy_(target.lm_head.weight)
        return head
