"""A check that ranks never part: that they were told the same, and chose the same."""

from hashlib import blake2b

import torch

from outdraft.core.errors import PartedError
from outdraft.core.plan import StepResult
from outdraft.distributed.group import RankGroup


class SameSteps:
    """Compares digests with all ranks of a group, step by step."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._told = blake2b(digest_size=8)
        self._num_steps = 0

    def add(self, data: bytes) -> None:
        """What this rank was told for the step."""
        self._told.update(data)

    def check(self, result: StepResult) -> None:
        """At the end of the step.

        Raises:
            PartedError: on all ranks, as one of them was told or chose something else.
        """
        chose = blake2b(digest_size=8)
        for one in result.works:
            ids = one.token_ids, one.accepted_rows, one.drafted_ids, one.drafted_parents
            chose.update(repr(ids).encode())
        own = [int.from_bytes(one.digest(), "little", signed=True) for one in (self._told, chose)]
        digests_t2 = self._group.gather(torch.tensor(own, device=self._device))
        self._num_steps += 1
        self._told = blake2b(digest_size=8)
        for what, digests in zip(("was told", "chose"), digests_t2.T.tolist(), strict=True):
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if others:
                ranks = ", ".join(map(str, others))
                raise PartedError(
                    f"ranks have parted: in step {self._num_steps} rank {ranks} {what} something "
                    "else than rank 0"
                )
