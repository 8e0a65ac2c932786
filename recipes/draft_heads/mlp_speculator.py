"""MLPSpeculator (Wertheimer et al. 2024, arXiv 2404.19124): a small recurrent network over tokens.

Its first state is the target's last hidden state h_i, behind the final norm; every step mixes the
state with the embedding of the last token and predicts the next one. All steps share their weights
except the projection of the first, so a checkpoint holds one copy of the shared tensors.

Dimension key: B sequences, L tokens in each, R roots, V vocabulary.
"""

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from target_states import TargetStates
from torch import Tensor, nn
from transformers import LlamaForCausalLM

NUM_DRAFTS = 4
INNER_SHARE = 3 / 8  # of the target's hidden size: most of a step's time is its output matrix
EPS = 1e-6


def scaled_to_unit_rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class ScaleAndShift(nn.Module):
    """What the paper's code calls a layer norm: unit root mean square, a scale and a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_to_unit_rms(x) * self.weight + self.bias


class MlpSpeculator(nn.Module):
    """The head, with the tensor names of IBM's checkpoints."""

    draft_ids = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        vocabulary, emb_dim, inner_dim = (
            config["vocab_size"],
            config["emb_dim"],
            config["inner_dim"],
        )
        self.speculator = nn.ModuleDict(
            {
                "emb": nn.ModuleList([nn.Embedding(vocabulary, inner_dim)]),
                "proj": nn.ModuleList(
                    [
                        nn.Linear(emb_dim, inner_dim, bias=False),
                        nn.Linear(inner_dim, inner_dim, bias=False),
                    ]
                ),
                "ln": nn.ModuleList([ScaleAndShift(inner_dim)]),
                "head": nn.ModuleList([nn.Linear(inner_dim, vocabulary, bias=False)]),
            }
        )

    @property
    def token_share(self) -> float:
        """The weight of a token's embedding beside the state's, which is one."""
        state_weight = 0.5 ** (0.5 / self.config["n_predict"])
        return math.sqrt((1 - state_weight**2) * self.config["inner_dim"] / 2) / state_weight

    def forward(self, states: TargetStates, ids_BL: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [B, R, V] of each draft, from every root 0..R-1, R = L - num_drafts."""
        num_roots = ids_BL.shape[1] - num_drafts
        parts = self.speculator
        state = scaled_to_unit_rms(states.hidden[:, :num_roots]) / math.sqrt(2)
        logits = []
        for step in range(num_drafts):
            token = parts["emb"][0](ids_BL[:, step + 1 : step + 1 + num_roots])
            mixed = parts["proj"][min(step, 1)](state) + self.token_share * token
            state = F.gelu(parts["ln"][0](mixed))
            logits.append(parts["head"][0](state))
        return logits

    @classmethod
    def from_target(cls, target: LlamaForCausalLM) -> Self:
        """A head to train, begun from the target.

        The state is narrower than the target's: it begins as the part of the target's state that
        the output matrix reads most of, tokens as the same part of their embeddings, at the scale
        of the paper.
        """
        hidden = target.config.hidden_size
        inner = int(hidden * INNER_SHARE)
        head = cls(
            {
                "architectures": ["MLPSpeculatorPreTrainedModel"],
                "model_type": "mlp_speculator",
                "vocab_size": target.config.vocab_size,
                "emb_dim": hidden,
                "inner_dim": inner,
                "n_predict": NUM_DRAFTS,
                "top_k_tokens_per_head": [1] * NUM_DRAFTS,
                "n_candidates": 1,
                "tie_weights": True,
                "scale_input": True,
                "torch_dtype": "bfloat16",
            }
        )
        with torch.no_grad():
            parts = head.speculator
            output = target.lm_head.weight
            directions = torch.linalg.svd(output, full_matrices=False).Vh[:inner]  # [inner, D]
            embedding = target.model.embed_tokens.weight @ directions.T
            parts["emb"][0].weight.copy_(embedding / embedding.std() / math.sqrt(inner))
            parts["proj"][0].weight.copy_(directions)
            parts["proj"][1].weight.copy_(torch.eye(inner))
            parts["head"][0].weight.copy_(output @ directions.T)
        return head
