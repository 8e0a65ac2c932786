"""The training of the draft heads: what they compute, learn from and leave on disk."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dspark import DSpark
from eagle3 import Eagle3
from export import HEADING, with_section
from heads import HEADS, draft_vocabulary, new_head, read_head, write_head
from target_states import target_states

from tests.reference import dflash as block_reference

NUM_DRAFTS = 4
NAMES = list(HEADS)
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # in float64, of sums of at most some hundred numbers


def some_ids(num_rows=2, length=12, seed=0):
    return torch.randint(2, 48, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def some_head(name, target):
    """Begun from the target, then shaken, so that no part of it is a copy, zero or the identity."""
    head = new_head(name, target, np.repeat(np.arange(48), np.arange(48)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return head.requires_grad_(False)


def in_float64(target, head):
    """Copies for claims that are exact: what is left of a difference there is no rounding."""
    return copy.deepcopy(target).double(), copy.deepcopy(head).double()


def rotate_pairs(vector, position, theta):
    """RoPE of one head's vector, as the complex multiplication that it is."""
    half = len(vector) // 2
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(
        torch.ones(half), position * theta ** -(torch.arange(half) / half)
    )
    return torch.cat([turned.real, turned.imag])


class SequentialEagle3:
    """One entry at a time, over a list of keys and values: the chain as an engine runs it."""

    def __init__(self, head, embedding):
        self.head, self.embedding = head, embedding
        self.keys, self.values = [], []

    def step(self, hidden, token, position):
        """The hidden state to go on with, and the logits, of one entry."""
        layer, config = self.head.midlayer, self.head.config
        theta, size = config["rope_theta"], config["head_dim"]
        both = torch.cat([layer.input_layernorm(self.embedding[token]), layer.hidden_norm(hidden)])
        attention = layer.self_attn
        heads = [matrix(both).split(size) for matrix in (attention.q_proj, attention.k_proj)]
        queries, keys = [[rotate_pairs(x, position, theta) for x in each] for each in heads]
        self.keys.append(keys)
        self.values.append(attention.v_proj(both).split(size))
        group = len(queries) // len(keys)
        mixed = []
        for number, query in enumerate(queries):
            seen = torch.stack([entry[number // group] for entry in self.keys])
            weights = (seen @ query / size**0.5).softmax(0)
            mixed.append(weights @ torch.stack([entry[number // group] for entry in self.values]))
        hidden = hidden + attention.o_proj(torch.cat(mixed))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, self.head.lm_head(self.head.norm(hidden))


def test_eagle3_unrolled_from_all_roots_equals_each_root_drafting_one_token_after_another(target):
    target, head = in_float64(target, some_head("eagle3", target))
    ids = some_ids(num_rows=1)
    states = target_states(target, ids)
    unrolled = head(states, ids, NUM_DRAFTS)
    for root in range(ids.shape[1] - NUM_DRAFTS):
        chain = SequentialEagle3(head, states.embedding)
        for entry in range(root + 1):
            streams = head.fc(states.taps[0, entry])
            hidden, logits = chain.step(streams, ids[0, entry + 1], entry)
        # The angles of RoPE are float32 in both, their sines are computed in two ways.
        torch.testing.assert_close(unrolled[0][0, root], logits, rtol=1e-5, atol=1e-5)
        for step in range(1, NUM_DRAFTS):
            hidden, logits = chain.step(hidden, ids[0, root + 1 + step], root + step)
            torch.testing.assert_close(unrolled[step][0, root], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_from_all_roots_are_those_of_each(target, name):
    target, head = in_float64(target, some_head(name, target))
    ids, config = some_ids(num_rows=1), head.config
    states = target_states(target, ids)
    weights = head.state_dict() | {"embed_tokens.weight": states.embedding}
    settings = block_reference.Settings(
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["rope_theta"],
        config["rms_norm_eps"],
        config["block_size"],
        config["dflash_config"]["mask_token_id"],
        windows=(None, None),
        is_causal=(False, False),
    )
    roots = torch.arange(ids.shape[1] - NUM_DRAFTS)
    told = head.drafts(states, ids, NUM_DRAFTS, roots)[1] if name == "dspark" else None
    drafted = head(states, ids, NUM_DRAFTS)
    for root in (0, 3, ids.shape[1] - NUM_DRAFTS - 1):
        tapped = [*states.taps[0, : root + 1].chunk(3, dim=-1)]
        block = block_reference.block_states(weights, settings, tapped, int(ids[0, root + 1]))
        for step in range(NUM_DRAFTS):
            expected, before = states.lm_head @ block[step], int(ids[0, root + 1 + step])
            # The angles are float32 in both, their sines are computed in two ways.
            exact = {"rtol": 1e-5, "atol": 1e-5}
            if told is not None:
                expected = expected + block_reference.pair_logits(weights, before)
                odds = block_reference.confidence(weights, block[step], before)
                assert float(told[step][0, root]) == pytest.approx(odds, rel=1e-5, abs=1e-5)
            torch.testing.assert_close(drafted[step][0, root], expected, **exact)


def test_dspark_begins_as_the_dflash_head_that_it_goes_on_from(target, monkeypatch):
    trained, ids = some_head("dflash", target), some_ids()
    states = target_states(target, ids)
    monkeypatch.setattr("dspark.INTERMEDIATE", trained.config["intermediate_size"])
    with torch.no_grad():
        head = DSpark.from_dflash(trained)
        for got, want in zip(head(states, ids, 4), trained(states, ids, 4), strict=True):
            torch.testing.assert_close(got, want)
        weakest = trained.layers[0].mlp.down_proj.weight.norm(dim=0).argmin()
        trained.layers[0].mlp.gate_proj.weight[weakest] = 0  # now it weighs nothing
        monkeypatch.setattr("dspark.INTERMEDIATE", trained.config["intermediate_size"] - 1)
        for layer in trained.layers[1:]:
            layer.mlp.gate_proj.weight[3] = 0
        want = trained(states, ids, 4)
        for got, one in zip(DSpark.from_dflash(trained)(states, ids, 4), want, strict=True):
            torch.testing.assert_close(got, one)


def test_the_mlp_speculator_mixes_state_and_token_as_its_paper_says(target):
    target, head = in_float64(target, some_head("mlp_speculator", target))
    ids = some_ids()
    states, tensors = target_states(target, ids), head.state_dict()
    tensors = {name.removeprefix("speculator."): value for name, value in tensors.items()}
    state_weight = 0.5 ** (0.5 / 4)
    emb_weight = ((1 - state_weight**2) * (head.config["inner_dim"] / 2)) ** 0.5
    for row, root in [(0, 0), (1, 3), (0, 7)]:
        state = states.hidden[row, root]
        state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
        for step in range(NUM_DRAFTS):
            token = tensors["emb.0.weight"][ids[row, root + 1 + step]]
            projected = tensors[f"proj.{min(step, 1)}.weight"] @ state
            mixed = projected + emb_weight / state_weight * token
            normed = mixed / (mixed.square().mean() + 1e-6).sqrt()
            state = F.gelu(normed * tensors["ln.0.weight"] + tensors["ln.0.bias"])
            logits = head(states, ids, NUM_DRAFTS)[step][row, root]
            expected = tensors["head.0.weight"] @ state
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_depends_on_no_token_from_its_own_on(target, name):
    target, head = in_float64(target, some_head(name, target))
    ids, root = some_ids(), 5
    before = head(target_states(target, ids), ids, NUM_DRAFTS)
    for step in range(NUM_DRAFTS):
        changed = ids.clone()
        changed[:, root + 2 + step :] = (changed[:, root + 2 + step :] + 1) % 48
        states = target_states(target, ids[:, : root + 1])
        # What the target thinks of places behind the root is not known when a chain is drafted.
        padded = target_states(target, F.pad(ids[:, : root + 1], (0, ids.shape[1] - root - 1)))
        torch.testing.assert_close(padded.taps[:, : root + 1], states.taps, **EXACT)
        after = head(padded, changed, NUM_DRAFTS)[step][:, root]
        torch.testing.assert_close(after, before[step][:, root], **EXACT)


def test_taps_are_the_streams_before_any_norm_and_hidden_is_behind_the_last(target):
    ids = some_ids()
    states = target_states(target, ids)
    streams = target.model(ids, output_hidden_states=True).hidden_states
    first, third, last = states.taps.chunk(3, dim=-1)
    torch.testing.assert_close(first, streams[1])
    torch.testing.assert_close(third, streams[3])
    torch.testing.assert_close(target.model.norm(last), streams[4])
    torch.testing.assert_close(states.hidden, streams[4])
    torch.testing.assert_close(states.logits, target(ids).logits)


def test_the_draft_vocabulary_is_the_smallest_that_covers_its_share_of_the_text():
    text = np.random.default_rng(0).zipf(1.3, 5000) % 300
    ids = draft_vocabulary(text, 300).numpy()
    counts = np.bincount(text, minlength=300)
    assert (np.diff(ids) > 0).all()
    assert counts[ids].sum() >= 0.985 * len(text)
    assert counts[ids].sum() - counts[ids].min() < 0.985 * len(text)
    assert counts[np.setdiff1d(np.arange(300), ids)].max() <= counts[ids].min()


def test_eagle3_names_its_draft_tokens_by_offsets_and_marks_them_in_the_targets_vocabulary(target):
    head = Eagle3.from_target(target, torch.tensor([0, 3, 4, 40]))
    assert head.d2t.tolist() == [0, 2, 2, 37]
    assert head.t2d.nonzero().flatten().tolist() == [0, 3, 4, 40]
    torch.testing.assert_close(head.lm_head.weight, target.lm_head.weight[[0, 3, 4, 40]])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again_to_the_bits_of_bfloat16(target, name, tmp_path):
    head = some_head(name, target)
    write_head(head, tmp_path)
    again = read_head(name, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == head.config == again.config
    wanted = head.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for key, tensor in again.state_dict().items():
        rounded = wanted[key].bfloat16().float() if tensor.is_floating_point() else wanted[key]
        assert tensor.dtype == rounded.dtype
        assert torch.equal(tensor, rounded), key


MLP = [f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
ATTENTION = [f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"]
BLOCK_LAYERS = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"self_attn.{part}_norm.weight" for part in "qk"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]
BLOCKS = [
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(f"layers.{layer}.{name}" for layer in range(2) for name in BLOCK_LAYERS),
]
TENSORS = {
    "dflash": BLOCKS,
    "dspark": [
        *BLOCKS,
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    ],
    "eagle3": [
        "fc.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
        *ATTENTION,
        *MLP,
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    ],
    "medusa": [
        *(f"blocks.{head}.layers.0.{part}" for head in range(4) for part in ("weight", "bias")),
    ],
    "mlp_speculator": [
        "speculator.emb.0.weight",
        "speculator.proj.0.weight",
        "speculator.proj.1.weight",
        "speculator.ln.0.weight",
        "speculator.ln.0.bias",
        "speculator.head.0.weight",
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_of_published_checkpoints(target, name):
    assert sorted(some_head(name, target).state_dict()) == sorted(TENSORS[name])


def test_the_cards_section_is_put_before_the_limits_and_replaced_when_written_again():
    card = "# Pair\n\ntext\n\n## Limits\n\n- small\n\n## Licence\n\nfree\n"
    once = with_section(card, f"{HEADING}\nfirst\n")
    assert once == card.replace("## Limits", f"{HEADING}\nfirst\n\n## Limits")
    assert with_section(once, f"{HEADING}\nsecond\n") == once.replace("first", "second")
