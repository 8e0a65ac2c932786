"""What a step is said to take, against what PyTorch allocates."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from outdraft.attention.base import AttentionForm, AttentionSizes
from outdraft.config.engine import SchedulerConfig
from outdraft.core.draft import STATE_WINDOW, Draft, TreeShape
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import RankGroup, gathered_sum
from outdraft.engine.build import build_engine
from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.data.noise import NOISE_NUMBERS, NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.attention import TorchAttention
from outdraft.kernels.torch.sampling import score_tokens
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.block_pool import LayerCacheShape
from outdraft.loading import memory
from outdraft.loading import models as loading
from outdraft.loading.memory import (
    DRAFT_PROBS,
    NOISE_BYTES,
    SAMPLING,
    STATES,
    StepShape,
    activation_bytes,
    draft_prob_bytes,
    prompt_score_bytes,
    sampling_bytes,
    text_bytes,
)
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig, RopeConfig
from outdraft.runner.logprobs import PROMPT_ROWS
from outdraft.runner.state import DeviceState, StepTexts
from outdraft.runner.verified_parts import PartToVerify, PartVerifier
from outdraft.sampling.processors import process_logits
from outdraft.verification.verifier import Verifier
from tests.attention.ragged import Model, Shape, build_batch
from tests.engine.measured_memory import peak_bytes
from tests.kernels.tables import kernels_for
from tests.oracle.engines import config, engine, greedy, models, prompts_of, run, speculation
from tests.pairwise import rows
from tests.sampling_batches import batch_of_params

CPU = torch.device("cpu")


def step_shape(
    num_draft_rows: int = 0,
    num_sampled: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    is_compiled: bool = False,
    **scheduler: int,
) -> StepShape:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64} | scheduler
    return StepShape(
        SchedulerConfig(**sizes),
        100,
        num_draft_rows,
        num_sampled,
        dtype,
        device,
        noise_is_compiled=is_compiled,
        penalties_are_compiled=is_compiled,
    )


class NoAttention:
    """Takes no memory."""

    name = "none"

    def write(self, *args) -> None: ...

    def attend(self, q_THC, cache, metadata, form):
        return q_THC


def model_config(hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=7,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=64,
        max_model_len=300,
        rope=RopeConfig(),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        windows=(None, None),
        bos_token_id=None,
        eos_token_ids=(),
        torch_dtype=None,
    )


def pass_bytes(model: CausalLM) -> int:
    """What a pass of 256 rows takes at most."""
    for weight in model.parameters():
        weight.fill_(0.01)
    ids_T = torch.zeros(256, dtype=torch.int64)
    metadata = SimpleNamespace(slots_T=None, positions_T=torch.arange(256))
    model.pack()
    with torch.inference_mode():
        return peak_bytes(lambda: model(ids_T, [None] * 2, metadata))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 512, 2, 1), (512, 64, 2, 1), (64, 64, 12, 2)])
def test_activations_are_what_the_widest_layer_takes(sizes, dtype):
    own = model_config(*sizes)
    taken = pass_bytes(CausalLM(own, replace(reference_kernels(), attention=NoAttention()), dtype))
    shape = step_shape(dtype=dtype, max_num_batched_tokens=256)
    small = model_config(64, 64, 1, 1)
    planned = activation_bytes(shape, [own, small])
    assert planned == activation_bytes(shape, [small, own])  # the drafter's may be the widest
    assert 0.6 * planned <= taken <= planned


class Echo:
    """All ranks send what this one sends; as with Gloo, the parts lie side by side."""

    def __init__(self, size: int) -> None:
        self.size, self.num_messages = size, 0

    def gather(self, data: torch.Tensor) -> torch.Tensor:
        return data.repeat(self.size, 1)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return gathered_sum(self, part)

    def abort(self) -> None:
        raise NotImplementedError

    def exchange(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sizes", [(512, 64, 4, 4), (256, 2048, 4, 4)])
def test_activations_of_a_rank_hold_the_parts_of_all_ranks(sizes, size, dtype):
    whole, group = model_config(*sizes), RankGroup(0, size, Echo(size))
    kernels = replace(reference_kernels(), attention=NoAttention())
    model = CausalLM(whole, kernels, dtype, group=group)
    taken = pass_bytes(model)
    shape = step_shape(dtype=dtype, max_num_batched_tokens=256)
    planned = activation_bytes(replace(shape, num_ranks=size), [model.shard])
    assert 0.6 * planned <= taken <= planned


EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.2,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    min_tokens=3,
    logit_bias={3: 1.0},
    allowed_token_ids=list(range(2000)),
    stop_token_ids=[5],
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sampling_is_what_all_parameters_at_once_take(dtype):
    num_rows, vocab_size = 16, 4096
    sampling = batch_of_params(
        [EVERYTHING] * num_rows,
        seeds=range(num_rows),
        vocab_size=vocab_size,
        device="cpu",
        bad_words=[[[4, 5]]] * num_rows,
        stop_ids=[[5]] * num_rows,
    )
    rows_R = torch.arange(num_rows)
    lengths_R = torch.full((num_rows,), 6)
    paths = Paths(torch.randint(0, 9, (num_rows, 6)), lengths_R - 2, lengths_R, None)
    kernels = kernels_for(dtype)
    drafts = DraftBatch.empty(num_rows, "cpu")

    def sample():
        logits_RV = torch.randn(num_rows, vocab_size, dtype=dtype)
        processed_RV = process_logits(kernels, logits_RV, rows_R, paths, sampling)
        kernels.verify(processed_RV, drafts, sampling, lengths_R, Rule.MATCH)
        return logits_RV, processed_RV.softmax(1)

    sample()
    sizes = {"max_num_seqs": num_rows, "max_num_batched_tokens": num_rows}
    shape = step_shape(dtype=dtype, is_compiled=dtype is torch.float32, **sizes)
    planned = sampling_bytes(shape, vocab_size)
    assert 0.5 * planned <= peak_bytes(sample) <= planned


class LargeHead:
    """As much of a model as verification asks for, with the logits of 151,936 tokens."""

    vocabulary = SimpleNamespace(num_tokens=151_936)

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(states_RD), self.vocabulary.num_tokens)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_many_drafts_are_verified_in_no_more_memory_than_the_plan_says(is_compiled: bool):
    num_requests, num_drafts, text = 10, 24, 40
    kernels = kernels_for(torch.float32) if is_compiled else reference_kernels()
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.2, logit_bias={3: 1.0})
    model, all_params = LargeHead(kernels), [params] * num_requests
    slots = [SimpleNamespace(params=SamplingParams(logprobs=2))] * num_requests
    sampling = batch_of_params(
        all_params, seeds=range(num_requests), vocab_size=151_936, device="cpu"
    )
    drafts = DraftBatch.from_drafts([Draft.chain(range(num_drafts))] * num_requests, "cpu")
    rows_B, lengths_B = torch.arange(num_requests), torch.full((num_requests,), text)
    of_all = PartToVerify(slots, drafts, sampling, StepTexts(rows_B, lengths_B, lengths_B), None)
    texts_SL = torch.ones(num_requests, text + 1, dtype=torch.int64)
    verifier = PartVerifier(model, Verifier(kernels, "block"), texts_SL, text, num_drafts, 2)
    states_RD = torch.zeros(num_requests * (num_drafts + 1), 1)

    def verify():
        return verifier.verified(of_all, states_RD, [num_drafts] * num_requests, chooses=False)

    sizes = {"max_num_seqs": num_requests, "max_num_batched_tokens": 8192}
    own = step_shape(num_requests * num_drafts, is_compiled=is_compiled, **sizes)
    assert peak_bytes(verify) <= sampling_bytes(own, 151_936) < 300e6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_probabilities_of_a_prompt_are_counted(dtype):
    vocab_size = 1 << 16
    next_R = torch.arange(PROMPT_ROWS)

    def score():
        logits_RV = torch.randn(PROMPT_ROWS, vocab_size, dtype=dtype)
        return score_tokens(logits_RV, next_R, 20)

    shape = step_shape(dtype=dtype)
    planned = prompt_score_bytes(shape, vocab_size)
    assert 0.2 * planned <= peak_bytes(score) <= planned
    assert prompt_score_bytes(replace(shape, num_ranks=4), vocab_size) < planned


def test_noise_that_is_not_compiled_is_made_a_few_numbers_at_a_time():
    rows_R, vocab_size = torch.arange(16), 1 << 16
    keys = NoiseKeys.of(rows_R, rows_R, Purpose.SAMPLE)
    taken = peak_bytes(lambda: noise.gumbel(keys, vocab_size)) - 16 * vocab_size * 4
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    own = step_shape(device=torch.device("cuda"), **sizes)
    compiled = replace(own, noise_is_compiled=True)
    planned = [sampling_bytes(one, vocab_size) for one in (own, compiled)]
    assert 0.9 * taken <= NOISE_BYTES * NOISE_NUMBERS <= 1.2 * taken
    assert planned[1] <= planned[0] <= planned[1] + NOISE_BYTES * NOISE_NUMBERS


def test_logits_are_counted_for_the_rows_that_can_be_sampled():
    sizes = {"max_num_seqs": 40, "max_num_batched_tokens": 2048}
    plain = sampling_bytes(step_shape(is_compiled=True, **sizes), 1000)
    assert sampling_bytes(step_shape(40, is_compiled=True, **sizes), 1000) > 1.4 * plain
    many = [sampling_bytes(step_shape(n * 40, is_compiled=True, **sizes), 1000) for n in (51, 63)]
    assert many[0] == many[1]  # as many as there are rows


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num_sampled", [0, 24])
def test_many_drafts_of_a_large_vocabulary_take_no_more_than_a_part(is_compiled, num_sampled):
    """As for a published model of 151,936 tokens: 24 drafts of each of 256 requests."""
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    own = step_shape(24 * 256, num_sampled, is_compiled=is_compiled, **sizes)
    own = replace(own, has_network=num_sampled > 0)
    logits = sampling_bytes(own, 151_936) + prompt_score_bytes(own, 151_936)
    assert logits < 300e6
    assert draft_prob_bytes(own, 151_936) < 620e6
    few = replace(own, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    assert sampling_bytes(replace(few, num_draft_rows=63), 151_936) > logits / 3


def test_only_sampled_drafts_have_probabilities():
    assert draft_prob_bytes(step_shape(3 * 4, 3), 1000) == 3 * 4 * 3 * 1000 * 4
    assert draft_prob_bytes(step_shape(3 * 4), 1000) == 0


def test_a_rank_keeps_probabilities_of_the_drafts_that_it_verifies():
    """Eight requests of three drafts; a rank of two verifies four of them, or one prediction."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    shape = replace(step_shape(63, 3, **sizes), num_ranks=2)
    assert draft_prob_bytes(shape, 1000) == (2 * 4 * 3 + 63) * 1000 * 4


def test_a_tree_is_paid_for_in_full_however_few_of_its_rows_are_verified():
    """Four requests of one row each in the scheduler's budget; the drafter's levels are as wide."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 4}
    tree = replace(step_shape(4 * 16, 16, **sizes), tree=TreeShape((8, 8)))
    assert draft_prob_bytes(tree, 1000) == 3 * 4 * 16 * 1000 * 4
    model = model_config(64, 64, 1, 1)
    assert activation_bytes(tree, [model]) == 8 * activation_bytes(step_shape(**sizes), [model])


def test_texts_are_what_the_device_state_takes():
    assert text_bytes(step_shape()) == DeviceState(4, 100, CPU).token_ids_SL.nbytes


BATCHES = {
    "trees": [Shape(500, 1, (0, 1, 2))] * 12,
    "a prompt": [Shape(0, 200, ())] + [Shape(500, 1, ())] * 8,
    "ragged": [Shape(300, rows, ()) for rows in (64, 40, 30, 20, 16, 9, 5, 3, 1, 1)],
}
MODES = ((False, 1 << 26), (False, 200_000), (False, 1), (True, 1 << 22), (True, 200_000))


@pytest.mark.parametrize(
    ("batch", "mode", "dtype"),
    rows(product(BATCHES, MODES, (torch.float64, torch.float32, torch.float16))),
)
def test_the_reference_attention_takes_no_more_than_it_says(batch, mode, dtype):
    requests, (in_order, max_elements) = BATCHES[batch], mode
    model = Model(8, 4, 32, 16)
    made = build_batch(requests, model, dtype, seed=0)
    attention = TorchAttention(max_elements, in_order=in_order)
    taken = peak_bytes(
        lambda: attention.attend(made.q_THC, made.cache, made.metadata, AttentionForm(1.0, 100))
    )
    sizes = (len(requests), len(made.q_THC), made.metadata.max_seq_len, 8)
    said = attention.temporary_bytes(AttentionSizes(*sizes, LayerCacheShape(4, 32, 32), dtype))
    queries = len(made.q_THC) * 8 * 32 * 8 * 4
    assert taken <= said + queries
    assert said < 12 * taken or max_elements == 1


def test_an_engine_without_speculation_pays_for_no_drafts():
    plain, drafting = (engine("qwen2", method).memory.step for method in ("plain", "ngram"))
    assert plain[SAMPLING] < drafting[SAMPLING]
    assert plain[DRAFT_PROBS] == drafting[DRAFT_PROBS] == 0
    assert engine("qwen2", "draft_model").memory.step[DRAFT_PROBS] > 0


def test_free_memory_is_read_before_anything_is_allocated(monkeypatch):
    order: list[str] = []
    free = memory.device_memory
    monkeypatch.setattr(
        memory, "device_memory", lambda device: (order.append("free"), free(device))[1]
    )
    monkeypatch.setattr(
        loading, "DeviceState", lambda *args: (order.append("texts"), DeviceState(*args))[1]
    )
    chosen = config("qwen2", speculation("qwen2", "plain", 3))
    build_engine(chosen, models("qwen2", None, "float32", "cpu", "auto"))
    assert order == ["free", "texts"]


def test_a_drafter_that_reads_states_pays_for_them_and_for_its_window():
    plans = {m: engine("qwen2", m).memory for m in ("plain", "draft_model", "eagle3", "medusa")}
    assert plans["plain"].step[STATES] == plans["draft_model"].step[STATES] == 0
    assert plans["eagle3"].step[STATES] > plans["medusa"].step[STATES] > 0
    hidden, block = 32, plans["plain"].block_size
    own_keys = 2 * 2 * 8 * block * 4  # of one layer with two heads of eight
    kept = plans["eagle3"].block_bytes - plans["plain"].block_bytes
    assert kept == own_keys
    # Beside the window: three streams of each row, twice, and twice what is made of them.
    rows, window = 24 * 8 * hidden * 4, (4 * STATE_WINDOW + 1) * hidden * 4
    assert plans["eagle3"].step[STATES] == rows + window
    assert plans["medusa"].block_bytes == plans["plain"].block_bytes


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "eagle3-tree", "medusa"])
def test_a_step_takes_no_more_than_the_plan_says(method: str):
    llm = engine("qwen2", method, kernels="reference", dtype="float64", max_num_seqs=8)
    prompts = prompts_of([60, 9, 9, 9, 9, 9, 9, 9])
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=9, presence_penalty=0.3)
    run(llm, prompts[:2], greedy(2))  # first calls allocate

    def generate():
        return run(llm, prompts, params)

    assert peak_bytes(generate) <= sum(llm.memory.step.values())
