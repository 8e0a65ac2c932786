"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads that each predict one more token ahead.

All heads read the target's last hidden state h_i, behind the final norm, and nothing of the tokens
drafted before theirs: head s predicts token i + 2 + s (the target itself predicts token i + 1).
A head is a residual block alone: its logits come from the target's own output matrix, which is
neither trained nor stored.

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
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        self.blocks = nn.ModuleList(
            [ResidualBlock(hidden, layers) for _ in range(config["num_heads"])]
        )

    def forward(self, states: TargetStates, ids_BL: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [B, R, V] of each draft, from every root 0..R-1, R = L - num_drafts."""
        hidden = states.hidden[:, : ids_BL.shape[1] - num_drafts]
        return [F.linear(block(hidden), states.lm_head) for block in self.blocks[:num_drafts]]

    @classmethod
    def from_target(cls, target: LlamaForCausalLM) -> Self:
        """Heads to train; each begins as the identity: the target's own prediction."""
        head = cls(
            {
                "architectures": ["MedusaModel"],
                "model_type": "medusa",
                "hidden_size": target.config.hidden_size,
                "vocab_size": target.config.vocab_size,
                "num_heads": NUM_HEADS,
                "num_hidden_layers": 1,
                "medusa_fc_bias": True,
                "original_lm_head": True,
                "torch_dtype": "bfloat16",
            }
        )
        with torch.no_grad():
            for parameter in head.blocks.parameters():
                parameter.zero_()
        return head
