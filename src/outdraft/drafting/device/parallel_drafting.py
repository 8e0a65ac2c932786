"""Drafts all tokens of a chain in one pass (PARD, An et al. 2025, arXiv 2504.18583).

After the newest token the network reads mask tokens: one for every draft but the first, as causal
rows at the positions of the drafts. The row of the newest token gives the first draft, and the row
of each mask token gives the next one. So no draft depends on the drafts before it. The keys and
values of the mask tokens have no use later: whatever is accepted, the network counts as having read
the text up to the newest token only.

Networks that read states beside tokens (P-EAGLE, arXiv 2602.01469) have a learned state for the
mask tokens, which stands in for the target's.

Dimension key: B requests that draft, G those of all ranks that share the network, K drafts, V
vocabulary, T rows, S state rows, L tokens, D state.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.plan import ModelDrafting
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.grower import KnownLevels, LevelDrafter
from outdraft.drafting.device.text_reader import TextReader
from outdraft.kv.cache import KVCache
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.drafters.config import MASK_KEYS, read_mask_token


def mask_token_id(path: Path, vocab_size: int) -> int:
    """The mask token that the config.json of a checkpoint directory names.

    Raises:
        ConfigError: it names none, or one outside of the vocabulary: the checkpoint was not
            trained to draft in parallel.
    """
    token = read_mask_token(read_json(path / "config.json"), vocab_size)
    if token is None:
        raise ConfigError(
            f"{path} was not trained for parallel drafting: its config.json has none of "
            f"{', '.join(MASK_KEYS)}"
        )
    return token


class ParallelDrafter(LevelDrafter):
    """A network that was trained to read mask tokens."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        mask_token_id: int,
        window: StateWindow | None = None,
        mask_state_D: Tensor | None = None,
    ) -> None:
        """
        Args:
            max_rows: of one pass over texts.
            mask_token_id: of the network's vocabulary.
            window, mask_state_D: of a network whose token_shift is 1: its input beside mask tokens.
        """
        self.network = network
        self.state_window = window.num_tokens if window is not None else 0
        self.taps, self.reads_all_hidden = network.taps, network.reads_hidden
        self.drafting = ModelDrafting(source, max_kept=-network.token_shift)
        self.max_drafts, self.max_passes = MAX_DRAFTS, 1
        self._reader = TextReader(network, cache, max_rows, window, mask_state_D)
        self.keep = self._reader.keep
        self._mask = mask_token_id

    def levels(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        depth: int,
        shares: RequestShares = ALL_HERE,
    ) -> KnownLevels:
        num_levels = [min(ask.num_drafts, depth) for ask in asks]
        masked = [
            replace(ask, masks=(self._mask,) * (number - 1))
            for ask, number in zip(asks, num_levels, strict=True)
        ]
        states_GKD = self._reader.read_masked(masked, token_ids_SL, num_levels)
        logits_RV = self.network.logits(states_GKD.flatten(0, 1), shares)
        return KnownLevels(logits_RV.unflatten(0, (-1, states_GKD.shape[1])))
