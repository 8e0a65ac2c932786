"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that reads the target's streams.

Entry i is (the target's streams f_i after token i, the token after it) at position i; its output
predicts the token after that. A chain goes on from the last entry whose streams are known, its
root: the layer's own output stands in for the streams, a drafted token for the true one, and the
chain attends to the true entries up to its root and to itself. Training unrolls the chain from all
roots at once ("training-time test"), with the text's own tokens as drafts.

Dimension key: B sequences, L tokens in each, R roots, H heads, K kv heads, D head size, V the
target's vocabulary, N the draft vocabulary.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from target_states import TAPPED_LAYERS, TargetStates
from torch import Tensor, nn
from transformers import LlamaForCausalLM

KeysValues = tuple[Tensor, Tensor]


def rotated(x_BHRD: Tensor, positions_R: Tensor, theta: float) -> Tensor:
    """Rotary position embedding, in Llama's order: the halves of a head are the pairs."""
    half = x_BHRD.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x_BHRD.device) / half
    angles = positions_R[:, None].float() * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    low, high = x_BHRD[..., :half], x_BHRD[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    """Attention of one step of the chains of all roots, over true entries and the chain's own."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        self.num_heads, self.num_kv_heads = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        self.head_dim, self.theta = head_dim, config["rope_theta"]
        self.q_proj = nn.Linear(2 * hidden, self.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=False)

    def project(self, x: Tensor, positions_R: Tensor) -> tuple[Tensor, KeysValues]:
        """Queries [B, H, R, D], and keys and values [B, K, R, D], of x [B, R, 2 * hidden]."""
        q, k, v = (
            matrix(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for matrix in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotated(q, positions_R, self.theta), (rotated(k, positions_R, self.theta), v)

    def attend(self, q: Tensor, true: KeysValues, chain: list[KeysValues]) -> Tensor:
        """[B, R, hidden]: root r sees the true entries 0..r and, of each of `chain`, entry r."""
        keys, values = true
        q = q.unflatten(1, (self.num_kv_heads, -1))  # [B, K, H / K, R, D]
        q = q * self.head_dim**-0.5
        groups, roots = q.shape[2:4]
        scores = q.flatten(2, 3) @ keys.transpose(-1, -2)
        later = torch.ones(roots, roots, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.unflatten(2, (groups, roots)).masked_fill(later, -torch.inf)
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in chain]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        mixed = (weights[..., :roots].flatten(2, 3) @ values).unflatten(2, (groups, roots))
        for step, (_, v) in enumerate(chain):
            mixed = mixed + weights[..., roots + step, None] * v[:, :, None]
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The decoder layer; only its attention's input is two hidden sizes wide."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)  # of the token's embedding
        self.hidden_norm = nn.RMSNorm(hidden, eps)  # of the streams, or of what stands in for them
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(config)


class Eagle3(nn.Module):
    """The head, with the tensor names of SpecForge's and the EAGLE repository's checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, draft_vocabulary = config["hidden_size"], config["draft_vocab_size"]
        self.fc = nn.Linear(len(TAPPED_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @property
    def draft_ids(self) -> Tensor:
        """[N] int64, ascending: the target's name of each draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_draft_ids(self, draft_ids_N: Tensor) -> None:
        self.d2t.copy_(draft_ids_N - torch.arange(len(draft_ids_N)))
        self.t2d.zero_()
        self.t2d[draft_ids_N] = True

    def forward(self, states: TargetStates, ids_BL: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [B, R, N] of each draft, from every root 0..R-1, R = L - num_drafts.

        Draft s of root i has read tokens 0..i+1+s, and the target's streams of 0..i.
        """
        num_roots = ids_BL.shape[1] - num_drafts
        roots = torch.arange(num_roots, device=ids_BL.device)
        layer = self.midlayer
        # Norms and sums keep the weights' precision where products run in a lower one.
        hidden = self.fc(states.taps[:, :num_roots]).to(self.norm.weight.dtype)
        entries: list[KeysValues] = []
        logits = []
        for step in range(num_drafts):
            embedded = F.embedding(ids_BL[:, step + 1 : step + 1 + num_roots], states.embedding)
            both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
            queries, own = layer.self_attn.project(both, roots + step)
            entries.append(own)
            hidden = hidden + layer.self_attn.attend(queries, entries[0], entries[1:])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    @classmethod
    def from_target(cls, target: LlamaForCausalLM, draft_ids_N: Tensor) -> Self:
        """A head to train: every part that has a counterpart in the target begins as a copy."""
        config = target.config
        head = cls(eagle3_config(target, len(draft_ids_N)))
        last, layer = target.model.layers[-1], head.midlayer
        with torch.no_grad():
            head.set_draft_ids(draft_ids_N)
            # The layer begins as the target's last one, on the stream which that one reads; what
            # the other streams and the embedding are good for is to be learned.
            streams = head.fc.weight.mul_(0.1).unflatten(1, (len(TAPPED_LAYERS), -1))
            streams[:, -2] = torch.eye(config.hidden_size)
            for name in ("q_proj", "k_proj", "v_proj"):
                wide = getattr(layer.self_attn, name).weight.mul_(0.1)
                wide[:, config.hidden_size :] = getattr(last.self_attn, name).weight
            layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            layer.mlp.load_state_dict(last.mlp.state_dict())
            layer.input_layernorm.weight.copy_(target.model.layers[0].input_layernorm.weight)
            layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
            layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            head.norm.weight.copy_(target.model.norm.weight)
            head.lm_head.weight.copy_(target.lm_head.weight[draft_ids_N])
        return head


def eagle3_config(target: LlamaForCausalLM, draft_vocab_size: int) -> dict[str, Any]:
    """config.json of a head for `target`: a layer of the target's own shape."""
    config = target.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        # Counted, as vLLM reads them here; within eagle_config others name layers from 0 on.
        "eagle_aux_hidden_state_layer_ids": list(TAPPED_LAYERS),
        "eagle_config": {"use_aux_hidden_state": True},
        "torch_dtype": "bfloat16",
    }
