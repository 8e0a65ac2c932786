"""DFlash (Chen et al. 2026, arXiv 2602.06036): two layers that draft a block of tokens in one pass.

A root i is the newest token whose streams are known. Its block is the token behind it, the anchor,
and mask tokens behind that, at positions i + 1, i + 2, ...; row s predicts token i + 2 + s, the one
behind its place. The paper's anchor drafts nothing and its mask rows predict their own places; a
small network does better if the first draft comes of the row that has read the newest token
(`sample_from_anchor`). In every layer all rows of a block see each other, and the keys and values
that the layer makes of the target's streams at places 0..i. So all drafts come of one pass, and
none depends on another. The embedding and the output matrix are the target's.

Dimension key: B sequences, L tokens in each, R roots, S rows of a block, H heads, K kv heads, D
head size, V the target's vocabulary.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from eagle3 import KeysValues, Mlp, rotated
from target_states import TAPPED_LAYERS, TargetStates
from torch import Tensor, nn
from transformers import LlamaForCausalLM

BLOCK_SIZE, NUM_LAYERS, INTERMEDIATE = 4, 2, 832
MASK_TOKEN = 0  # nothing stands behind a text's first token
ROOT_STRIDE = 2  # in training: roots beside each other teach much the same


class Attention(nn.Module):
    """Queries of blocks, over what the layer makes of the streams and of the blocks themselves."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.num_kv_heads, self.theta = head_dim, kv_heads, config["rope_theta"]
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(head_dim, config["rms_norm_eps"])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """Each [B, K, T, D], of rows x [B, T, hidden]."""
        keys = self.k_norm(self._heads(self.k_proj(x)).to(self.k_norm.weight.dtype))
        return rotated(keys, positions, self.theta), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, context: KeysValues, roots_R: Tensor) -> Tensor:
        """[B, R, S, hidden] of rows x [B, R, S, hidden]."""
        num_roots, num_rows = x.shape[1:3]
        positions = (roots_R[:, None] + 1 + torch.arange(num_rows)).flatten()
        flat = x.flatten(1, 2)
        queries = self.q_norm(self._heads(self.q_proj(flat)).to(self.q_norm.weight.dtype))
        queries = rotated(queries, positions, self.theta)
        own_keys, own_values = self.keys_values(flat, positions)
        keys, values = context
        shape = (self.num_kv_heads, -1)
        queries = (queries * self.head_dim**-0.5).unflatten(1, shape)  # [B, K, H / K, R * S, D]
        groups = queries.shape[2]
        scores = queries.flatten(2, 3) @ keys.transpose(-1, -2)
        scores = scores.unflatten(2, (groups, num_roots, num_rows))
        later = torch.arange(keys.shape[2]) > roots_R[:, None]
        scores = scores.masked_fill(later[:, None], -torch.inf)
        blocks = queries.unflatten(3, (num_roots, num_rows))
        own_keys, own_values = (
            each.unflatten(2, (num_roots, num_rows))[:, :, None] for each in (own_keys, own_values)
        )
        own = blocks @ own_keys.transpose(-1, -2)
        weights = torch.cat([scores, own], dim=-1).softmax(-1)
        seen, near = weights.split([keys.shape[2], num_rows], dim=-1)
        mixed = (seen.flatten(2, 4).to(values.dtype) @ values).unflatten(2, seen.shape[2:5])
        mixed = mixed + near.to(own_values.dtype) @ own_values
        mixed = mixed.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(3)
        return self.o_proj(mixed)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(config)


class DFlash(nn.Module):
    """The head, with the tensor names of the checkpoints that DFlash's authors publish."""

    draft_ids = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = nn.Linear(len(TAPPED_LAYERS) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps)

    @staticmethod
    def config_for(target: LlamaForCausalLM) -> dict[str, Any]:
        """config.json of a head for `target`."""
        return dflash_config(target)

    def training_roots(self, ids_BL: Tensor, num_drafts: int) -> Tensor:
        """[R] int64: some roots, other ones for other tokens."""
        first = int(ids_BL.sum()) % ROOT_STRIDE
        return torch.arange(first, ids_BL.shape[1] - num_drafts, ROOT_STRIDE)

    def forward(
        self,
        states: TargetStates,
        ids_BL: Tensor,
        num_drafts: int,
        roots_R: Tensor | None = None,
    ) -> list[Tensor]:
        """Logits [B, R, V] of each draft, from these roots, or from every root 0..R-1,
        R = L - num_drafts."""
        if roots_R is None:
            roots_R = torch.arange(ids_BL.shape[1] - num_drafts)
        hidden = self.block_states(states, ids_BL, roots_R)
        return [F.linear(hidden[:, :, s], states.lm_head) for s in range(num_drafts)]

    def block_states(self, states: TargetStates, ids_BL: Tensor, roots_R: Tensor) -> Tensor:
        """[B, R, S, hidden]: behind the final norm. A block is whole, however few of its drafts
        are asked for."""
        block = ids_BL.new_full((*ids_BL[:, roots_R].shape, self.config["block_size"]), MASK_TOKEN)
        block[..., 0] = ids_BL[:, roots_R + 1]
        hidden = F.embedding(block, states.embedding)
        # Norms and sums keep the weights' precision where products run in a lower one.
        streams = self.hidden_norm(self.fc(states.taps).to(self.norm.weight.dtype))
        places = torch.arange(ids_BL.shape[1])
        for layer in self.layers:
            context = layer.self_attn.keys_values(streams, places)
            rows = layer.input_layernorm(hidden)
            hidden = hidden + layer.self_attn(rows, context, roots_R)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    @classmethod
    def from_target(cls, target: LlamaForCausalLM) -> Self:
        """A head to train: it begins with what the target's last layers know."""
        config = target.config
        head, head_dim = cls(cls.config_for(target)), config.head_dim
        with torch.no_grad():
            streams = head.fc.weight.mul_(0.1).unflatten(1, (len(TAPPED_LAYERS), -1))
            streams[:, -2] = torch.eye(config.hidden_size)
            head.norm.weight.copy_(target.model.norm.weight)
            head.hidden_norm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
            for layer, known in zip(head.layers, target.model.layers[-NUM_LAYERS:], strict=True):
                for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                    matrix = getattr(layer.self_attn, name).weight
                    heads = getattr(known.self_attn, name).weight.unflatten(0, (-1, head_dim))
                    copies = len(matrix) // heads.shape[:2].numel()
                    matrix.copy_(heads.repeat_interleave(copies, dim=0).flatten(0, 1))
                for name in ("gate_proj", "up_proj"):
                    matrix = getattr(layer.mlp, name).weight
                    matrix.copy_(getattr(known.mlp, name).weight[: len(matrix)])
                inner = head.config["intermediate_size"]
                layer.mlp.down_proj.weight.copy_(known.mlp.down_proj.weight[:, :inner])
                layer.input_layernorm.weight.copy_(known.input_layernorm.weight)
                norm = known.post_attention_layernorm.weight
                layer.post_attention_layernorm.weight.copy_(norm)
        return head


def dflash_config(target: LlamaForCausalLM) -> dict[str, Any]:
    """config.json of a head for `target`: layers of its own shape, but for narrower blocks behind
    attention."""
    config = target.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": min(INTERMEDIATE, config.intermediate_size),
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "num_target_layers": config.num_hidden_layers,
        "block_size": BLOCK_SIZE,
        "sample_from_anchor": True,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [layer - 1 for layer in TAPPED_LAYERS],
        },
        "torch_dtype": "bfloat16",
    }
