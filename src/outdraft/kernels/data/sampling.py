"""The sampling parameters of a batch, as tensors on the device and flags on the host.

Built when the composition of the batch changes and kept while it stays the same. The flags say
which stages run at all, so that a batch of greedy requests costs no more than its argmax.

Dimension key: B requests, R rows, E ids of a request's list (padded), W bad words, or int32 words
of a mask of one bit per token, L prefix of a bad word, or committed tokens, K places of a path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import TokenRules
from outdraft.core.sampling import SamplingParams

# Stands for any token in the prefix of a bad word; it is no token and no padding itself.
ANY_TOKEN = -2

# Logits are shifted so that their best is 0 before they are divided: nothing overflows, and what
# is this close to zero only has to stay above it in float32.
_LEAST_TEMPERATURE = 1e-30
# Logits are divided by it: they stay finite.
_LEAST_PENALTY = 1e-30


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of listed tokens per request; the padding is id 0 with value 0."""

    ids_BE: Tensor  # int64
    values_BE: Tensor  # float32


@dataclass(frozen=True, slots=True)
class TokenSets:
    """A set of tokens per request; the padding repeats a member, or is 0 where there is no set."""

    ids_BE: Tensor  # int64
    is_set_B: Tensor  # bool; False: this request has no such set


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not be completed.

    Attributes:
        prefix_BWL: int64; all tokens but the last, aligned to the right, ANY_TOKEN in front.
        prefix_lens_BW: int64; more than any text has in the padding, which so never matches.
        last_BW: int64; the token that would complete the word.
    """

    prefix_BWL: Tensor
    prefix_lens_BW: Tensor
    last_BW: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters by which the tokens of each request of a batch are chosen.

    A stage that no request needs has None instead of its tensors, or a false flag. Temperature,
    min_p, top_k and top_p are off for greedy requests: they would keep the best token the best.

    Attributes:
        seeds_B: int64; key of the request's noise.
        temperature_B: float32; 1 for greedy requests.
        is_greedy_B: bool.
        shares_noise_B: bool; the request is not greedy, and its drafts are drawn with the noise of
            the target's own choices and matched with these, so that its ids depend on no draft.
        top_k_B: int64 in [1, vocab_size]; vocab_size: off.
        top_p_B, min_p_B: float32; 1 and 0: off.
        repetition_B, presence_B, frequency_B: float32 penalties; 1, 0 and 0: off.
        min_tokens_B: int64.
        stops: the tokens that min_tokens forbids.
        has_grammar: some request's output keeps to a grammar: what it allows comes with each step.
        any_shares_noise: some of `shares_noise_B` is true.
        any_draws, all_draw: some of `draws_B` are true, or all.
        max_top_k: at least the largest top_k in use, one of few numbers: a GPU makes graphs for
            each; 0 when no sampled request has one.
    """

    vocab_size: int
    seeds_B: Tensor
    temperature_B: Tensor
    is_greedy_B: Tensor
    shares_noise_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    min_tokens_B: Tensor
    allowed: TokenSets | None
    bad_words: BadWords | None
    stops: TokenSets | None
    bias: TokenValues | None
    all_greedy: bool
    any_shares_noise: bool
    any_draws: bool
    all_draw: bool
    has_grammar: bool
    needs_penalties: bool
    needs_min_p: bool
    needs_top_p: bool
    max_top_k: int

    @classmethod
    def from_rules(
        cls,
        rules: Sequence[TokenRules],
        *,
        vocab_size: int,
        device: torch.device | str,
        shares_noise: bool = False,
    ) -> "SamplingBatch":
        """One batch of requests, in order; there may be none.

        All token ids must be in the vocabulary: that is checked once, when a request is added.

        Args:
            shares_noise: of all requests that are not greedy; False: of those with a seed of their
                own.
        """
        params = [one.params for one in rules]
        sampled = [one for one in params if not one.is_greedy]
        shares = [not one.is_greedy and (shares_noise or one.seed is not None) for one in params]
        top_ks = [_top_k(one, vocab_size) for one in params]
        columns = {
            "seeds_B": (np.int64, [one.seed for one in rules]),
            "temperature_B": (
                np.float32,
                [1 if p.is_greedy else max(p.temperature, _LEAST_TEMPERATURE) for p in params],
            ),
            "is_greedy_B": (np.bool_, [one.is_greedy for one in params]),
            "shares_noise_B": (np.bool_, shares),
            "top_k_B": (np.int64, top_ks),
            "top_p_B": (np.float32, [1 if one.is_greedy else one.top_p for one in params]),
            "min_p_B": (np.float32, [0 if one.is_greedy else one.min_p for one in params]),
            "repetition_B": (
                np.float32,
                [max(one.repetition_penalty, _LEAST_PENALTY) for one in params],
            ),
            "presence_B": (np.float32, [one.presence_penalty for one in params]),
            "frequency_B": (np.float32, [one.frequency_penalty for one in params]),
            "min_tokens_B": (np.int64, [one.min_tokens for one in params]),
        }
        device = torch.device(device)
        arrays = [np.array(numbers, dtype=dtype) for dtype, numbers in columns.values()]
        return cls(
            vocab_size=vocab_size,
            **dict(zip(columns, to_device(arrays, device), strict=True)),
            allowed=_token_sets([one.allowed_token_ids or () for one in params], device),
            bad_words=_bad_words([one.bad_words for one in rules], device),
            stops=_token_sets([one.stop_ids for one in rules], device),
            bias=_token_values([one.logit_bias or {} for one in params], device),
            all_greedy=not sampled,
            any_shares_noise=any(shares),
            any_draws=len(sampled) > sum(shares),
            all_draw=len(sampled) - sum(shares) == len(rules),
            has_grammar=any(one.structured is not None for one in params),
            needs_penalties=any(one.has_penalties for one in params),
            needs_min_p=any(one.min_p > 0 for one in sampled),
            needs_top_p=any(one.top_p < 1 for one in sampled),
            max_top_k=_rounded_top_k(top_ks, vocab_size),
        )

    @property
    def num_requests(self) -> int:
        return self.seeds_B.shape[0]

    @cached_property
    def of_drafts(self) -> "SamplingBatch":
        """The parameters for drafts: verification applies those that look back at the text."""
        return replace(self, needs_penalties=False, bad_words=None, stops=None, has_grammar=False)

    @cached_property
    def log_min_p_B(self) -> Tensor:
        """float32."""
        return self.min_p_B.log()

    @cached_property
    def allowed_BV(self) -> Tensor | None:
        """bool; None: all tokens are allowed."""
        if self.allowed is None:
            return None
        allowed_BV = self.allowed.ids_BE.new_zeros(
            self.num_requests, self.vocab_size, dtype=torch.bool
        )
        return allowed_BV.scatter_(1, self.allowed.ids_BE, True) | ~self.allowed.is_set_B[:, None]

    @cached_property
    def bias_BV(self) -> Tensor | None:
        """float32, added to logits; None: nothing is."""
        if self.bias is None:
            return None
        zeros_BV = self.bias.values_BE.new_zeros(self.num_requests, self.vocab_size)
        return zeros_BV.scatter_add_(1, self.bias.ids_BE, self.bias.values_BE)

    @cached_property
    def draws_B(self) -> Tensor:
        """bool; the request's drafts may be drawn with noise of their own, from probabilities that
        verification gets."""
        return ~(self.is_greedy_B | self.shares_noise_B)

    def with_copies(self, request: int, num_requests: int) -> "SamplingBatch":
        """These requests, then copies of one up to `num_requests`; kept as long as this batch."""
        if num_requests == self.num_requests:
            return self
        key = request, num_requests
        if key not in self._copied:
            places = [*range(self.num_requests)]
            places += [request] * (num_requests - len(places))
            (places_B,) = to_device([np.array(places)], self.seeds_B.device)
            self._copied[key] = _rows_of(self, lambda tensor: tensor.index_select(0, places_B))
        return self._copied[key]

    def part(self, requests: slice) -> "SamplingBatch":
        """Some of the requests. What is known on the host is that of all."""
        return _rows_of(self, lambda tensor: tensor[requests].contiguous())

    @cached_property
    def _copied(self) -> "dict[tuple[int, int], SamplingBatch]":
        return {}

    @property
    def needs_history(self) -> bool:
        """Some request looks at the tokens before a row (and so at the row's drafted path)."""
        return self.needs_penalties or self.bad_words is not None

    @property
    def needs_paths(self) -> bool:
        """Some request looks at a row's drafted path, or at its length."""
        return self.needs_history or self.stops is not None

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Every request wants the argmax of the raw logits."""
        return self.all_greedy and self.has_penalties_at_most and not self.needs_penalties

    @cached_property
    def has_penalties_at_most(self) -> bool:
        """Before temperature and cuts nothing but penalties changes the logits."""
        ways = self.bad_words, self.stops, self.allowed, self.bias
        return not self.has_grammar and all(way is None for way in ways)


@dataclass(frozen=True, slots=True)
class Paths:
    """The text before each row: what its request committed, and the drafts on the way to it.

    Attributes:
        history_BL: int64; committed ids, prompt and output with the root, padded with -1 on the
            right; None when `SamplingBatch.needs_history` is false.
        prompt_lens_B: int64.
        num_tokens_B: int64; committed tokens, the root included.
        path_ids_RK: int64; drafted ids from the root (excluded) to the row (included), padded
            with -1; None when all rows are roots.
        grammar_RW: int32; what the row's grammar allows after its text: bit v % 32 of word
            v // 32 stands for token v. No row is all zeros. None when no request has a grammar.
    """

    history_BL: Tensor | None
    prompt_lens_B: Tensor
    num_tokens_B: Tensor
    path_ids_RK: Tensor | None
    grammar_RW: Tensor | None = None

    def of_rows(self, rows: slice) -> "Paths":
        """Before these rows."""
        path_ids_RK, grammar_RW = self.path_ids_RK, self.grammar_RW
        return replace(
            self,
            path_ids_RK=None if path_ids_RK is None else path_ids_RK[rows],
            grammar_RW=None if grammar_RW is None else grammar_RW[rows],
        )


def _rows_of(value: Any, taken: Callable[[Tensor], Tensor]) -> Any:
    """Take requests of a tensor, or of the fields of a dataclass; other values stay."""
    if isinstance(value, Tensor):
        return taken(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{one.name: _rows_of(getattr(value, one.name), taken) for one in fields(value)}
    )


_NEVER = 2**62  # longer than any text


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    is_off = params.is_greedy or params.top_k <= 0
    return vocab_size if is_off else min(params.top_k, vocab_size)


def _rounded_top_k(top_ks: Sequence[int], vocab_size: int) -> int:
    """The largest that is on, up to a power of two; 0: all are off."""
    largest = max((k for k in top_ks if k < vocab_size), default=0)
    return min(1 << (largest - 1).bit_length(), vocab_size) if largest else 0


def _token_sets(sets: Sequence[Sequence[int]], device: torch.device) -> TokenSets | None:
    distinct = [list(dict.fromkeys(ids)) for ids in sets]  # no wider than the vocabulary
    width = max(map(len, distinct), default=0)
    if width == 0:
        return None
    padded = [[*ids, *(ids[:1] or [0]) * (width - len(ids))] for ids in distinct]
    is_set = [len(ids) > 0 for ids in sets]
    return TokenSets(*to_device([np.array(padded, dtype=np.int64), np.array(is_set)], device))


def _token_values(
    values: Sequence[Mapping[int, float]], device: torch.device
) -> TokenValues | None:
    width = max(map(len, values), default=0)
    if width == 0:
        return None
    filled = [[*one.items(), *[(0, 0.0)] * (width - len(one))] for one in values]
    ids = np.array([[token_id for token_id, _ in one] for one in filled], dtype=np.int64)
    padded = np.array([[value for _, value in one] for one in filled], dtype=np.float32)
    return TokenValues(*to_device([ids, padded], device))


def _bad_words(words: Sequence[Sequence[Sequence[int]]], device: torch.device) -> BadWords | None:
    width = max(map(len, words), default=0)
    if width == 0:
        return None
    length = max(len(word) for one in words for word in one) - 1
    prefix = np.full((len(words), width, length), ANY_TOKEN, dtype=np.int64)
    prefix_lens = np.full((len(words), width), _NEVER, dtype=np.int64)
    last = np.zeros((len(words), width), dtype=np.int64)
    for request, one in enumerate(words):
        for at, word in enumerate(one):
            prefix[request, at, length - len(word) + 1 :] = word[:-1]
            prefix_lens[request, at] = len(word) - 1
            last[request, at] = word[-1]
    return BadWords(*to_device([prefix, prefix_lens, last], device))
