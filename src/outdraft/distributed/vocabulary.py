"""A vocabulary that is spread over the ranks of a group.

Dimension key: T and R rows, D hidden, V tokens of the vocabulary, N of them that one rank has, S
columns of each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import can_spread, shard_width
from outdraft.distributed.group import RankGroup


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The tokens of one rank: ceil(V / t) of them, and on the last rank the rest.

    Attributes:
        num_tokens: V.

    Raises:
        ConfigError: when it is made, if the last rank has none.
    """

    group: RankGroup
    num_tokens: int

    def __post_init__(self) -> None:
        if not can_spread(self.num_tokens, self.group.size):
            raise ConfigError(
                f"a vocabulary of {self.num_tokens} tokens cannot be spread over "
                f"{self.group.size} ranks: the last one has none"
            )

    @property
    def width(self) -> int:
        """S: columns of logits on each rank."""
        return shard_width(self.num_tokens, self.group.size)

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return self.group.rank * self.width

    @property
    def num_own(self) -> int:
        """N."""
        return min(self.width, self.num_tokens - self.first)

    def embed(self, token_ids_T: Tensor, vectors_of: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, D]: the vectors of tokens, each from the rank that has it.

        Args:
            vectors_of: gives those of this rank's tokens, by their places among them.
        """
        own_T = token_ids_T - self.first
        is_own_T = (own_T >= 0) & (own_T < self.num_own)
        vectors_TD = vectors_of(torch.where(is_own_T, own_T, 0))
        return self.group.sum(vectors_TD.masked_fill(~is_own_T[:, None], 0))

    def padded(self, logits_RN: Tensor) -> Tensor:
        """[R, S]: -inf where this rank has no token. A padded tensor stays as it is."""
        missing = self.width - logits_RN.shape[1]
        return F.pad(logits_RN, (0, missing), value=-torch.inf) if missing else logits_RN

    def best_tokens(self, logits_RS: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [R]: of all ranks' tokens the one of the highest logit; bool [R]: that logit is
        finite. A NaN counts as the highest; of equal ones the first wins.

        Args:
            logits_RS: of this rank's tokens, padded.
        """
        best_R1 = logits_RS.argmax(dim=-1, keepdim=True)
        value_R1 = logits_RS.gather(1, best_R1)
        # float64 holds every value, and every token id.
        pair_R2 = torch.cat((value_R1.double(), (best_R1 + self.first).double()), dim=-1)
        pairs_tR2 = self.group.gather(pair_R2)
        rank_1R = pairs_tR2[:, :, 0].argmax(dim=0, keepdim=True)  # of equal ones the first
        value_R, best_R = (pairs_tR2[:, :, part].gather(0, rank_1R)[0] for part in (0, 1))
        return best_R.long(), value_R.isfinite()
