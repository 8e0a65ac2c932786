"""What a step takes beside weights and KV cache, at its largest, from shapes alone.

Bytes are counted where most tensors live at the same time, in plain PyTorch; compiled paths take
less. The parts are not all needed at once, but an allocator keeps what it once had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from outdraft.config.engine import SchedulerConfig
from outdraft.core.tree_shape import TreeShape
from outdraft.models.config import ModelConfig
from outdraft.runner.logprobs import PROMPT_ROWS

NOISE_BYTES = 90  # for each logit where noise is not compiled: eleven int64 and float64 tensors
# Tensors of logits where every sampling parameter is in use at the same time.
PROCESSING_TENSORS = 10
DRAFT_TENSORS = 3  # of probabilities: of each draft, stacked, and among the drafts of the host


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of an engine.

    Attributes:
        num_draft_rows: most drafts of all requests; 0 without speculation.
        samples_drafts: the draft model draws from its distribution, which is then kept.
        tree: of what the drafter makes; its rows have no part in the scheduler's budget until
            they are verified.
    """

    scheduler: SchedulerConfig
    max_model_len: int
    num_draft_rows: int
    samples_drafts: bool
    dtype: torch.dtype
    device: torch.device
    tree: TreeShape | None = None

    @property
    def num_rows(self) -> int:
        """Most rows of one pass of the target or the drafter."""
        widest = max(self.tree.levels) if self.tree is not None else 0
        return max(self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs * widest)

    @property
    def num_logit_rows(self) -> int:
        return min(self.scheduler.max_num_seqs + self.num_draft_rows, self.num_rows)

    @property
    def logit_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes.

    Attributes:
        texts: token ids of the running requests on the device.
        activations: of a pass of most rows through the widest layer.
        attention: what the attention takes in it.
        sampling: logits, their processed copies, probabilities, noise.
        draft_probs: of the network's sampled drafts.
        states: of the target, on their way to a drafter that reads them.
    """

    texts: int
    activations: int
    attention: int
    sampling: int
    draft_probs: int
    states: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def activation_bytes(shape: StepShape, models: Sequence[ModelConfig]) -> int:
    """What the widest model's layers take; the models run one after the other."""
    return shape.num_rows * max(_row_bytes(model, shape.dtype) for model in models)


def sampling_bytes(shape: StepShape, vocab_size: int) -> int:
    """What logits take on their way to ids, or a slice of a prompt's log-probabilities."""
    width, own = shape.logit_dtype.itemsize, shape.dtype.itemsize
    noise = width if shape.device.type == "cpu" else NOISE_BYTES
    per_logit = max(PROCESSING_TENSORS * width, 2 * width + noise)
    sampled = shape.num_logit_rows * vocab_size * per_logit
    prompt = min(PROMPT_ROWS, shape.num_rows) * vocab_size * (own + 4 * width)
    return max(sampled, prompt)


def draft_prob_bytes(shape: StepShape, vocab_size: int) -> int:
    """float32, whatever the model's dtype."""
    if not shape.samples_drafts:
        return 0
    num_drafts = min(shape.num_draft_rows, shape.num_rows)
    if shape.tree is not None:
        num_drafts = shape.scheduler.max_num_seqs * shape.tree.num_rows
    return DRAFT_TENSORS * num_drafts * vocab_size * 4


def state_bytes(shape: StepShape, hidden_size: int, num_taps: int, feature_size: int) -> int:
    """Tapped streams of a full step, side by side and once more as one; what is made of them; and
    the last state of each running request."""
    row = 2 * num_taps * hidden_size + 2 * feature_size
    last = shape.scheduler.max_num_seqs * hidden_size
    return (shape.num_rows * row + last) * shape.dtype.itemsize


def text_bytes(shape: StepShape) -> int:
    """int64, with the column that DeviceState has behind the longest text."""
    return shape.scheduler.max_num_seqs * (shape.max_model_len + 1) * 8


def _row_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """What one row takes in the middle of a layer, its residual included."""
    own, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    hidden = model.hidden_size
    queries = model.num_heads * model.head_size
    qkv = queries + 2 * model.num_kv_heads * model.head_size
    norm = 3 * hidden * own + 3 * hidden * wide
    rotary = (2 * hidden + qkv) * own + 4 * queries * wide
    attention = (2 * hidden + 2 * qkv) * own + queries * (own + wide)
    feed_forward = (2 * hidden + 4 * model.intermediate_size) * own
    return model.head_size * wide + max(norm, rotary, attention, feed_forward)  # angles: all along
