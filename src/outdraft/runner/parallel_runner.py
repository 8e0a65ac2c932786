"""The runner of rank 0 where several ranks compute: it sends its own work to the others."""

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NoReturn, Protocol

import torch

from outdraft.core.errors import PartedError
from outdraft.core.grammar import AllowedTokens, GrammarDrafts
from outdraft.core.plan import StepPlan, StepResult
from outdraft.distributed.group import RankGroup
from outdraft.runner.model_runner import LaunchedStep, ModelRunner
from outdraft.runner.results import PendingStep


class SameSteps:
    """Compares digests with all ranks of a group, step by step."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._received = blake2b(digest_size=8)
        self._num_steps = 0

    def add(self, data: bytes) -> None:
        """Count a message that this rank received for the step."""
        self._received.update(data)

    def check(self, result: StepResult) -> None:
        """At the end of the step.

        Raises:
            PartedError: on all ranks, if one of them received or chose something else.
        """
        chose = blake2b(digest_size=8)
        for one in result.works:
            ids = one.token_ids, one.accepted_rows, one.drafted_ids, one.drafted_parents
            chose.update(repr(ids).encode())
        own = [
            int.from_bytes(one.digest(), "little", signed=True) for one in (self._received, chose)
        ]
        digests_t2 = self._group.gather(torch.tensor(own, device=self._device))
        self._num_steps += 1
        self._received = blake2b(digest_size=8)
        for what, digests in zip(("was told", "chose"), digests_t2.T.tolist(), strict=True):
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if others:
                ranks = ", ".join(map(str, others))
                raise PartedError(
                    f"ranks have parted: in step {self._num_steps} rank {ranks} {what} something "
                    "else than rank 0"
                )


class OtherRanks(Protocol):
    """The other ranks, for rank 0."""

    def send(self, message: StepPlan | AllowedTokens) -> bytes:
        """Send them a step, or the rest of one, to compute; return the bytes sent.

        Raises:
            RanksError: one of them cannot.
        """
        ...

    def give_up(self, error: BaseException) -> NoReturn:
        """End them all after an error that rank 0 met in a step.

        Raises:
            RanksError: names the rank at fault.
        """
        ...


class ParallelRunner:
    """Runs the steps of a ModelRunner on all ranks. An error in a step, on any rank, ends all
    ranks: they cannot know how far the others came.

    Attributes:
        own: the runner of this rank.
    """

    def __init__(
        self, own: ModelRunner, others: OtherRanks, same_steps: SameSteps | None = None
    ) -> None:
        """`same_steps`: checks that the ranks never part; all ranks have one, or none has."""
        self.own = own
        self.model, self.cache, self.state = own.model, own.cache, own.state
        self.proposer, self.num_draft_groups = own.proposer, own.num_draft_groups
        self._others = others
        self._same_steps = same_steps

    def launch(self, plan: StepPlan) -> PendingStep | LaunchedStep:
        """Launch a step on all ranks.

        Raises:
            RanksError: the engine has to end, as from the other methods.
        """
        with self._together():
            self._tell(plan)
            return self.own.launch(plan)

    def drafted(self, step: LaunchedStep) -> GrammarDrafts:
        """Drafts of all ranks that masks must be made for."""
        with self._together():
            return self.own.drafted(step)

    def verify(self, step: LaunchedStep, allowed: AllowedTokens) -> PendingStep:
        """Issue the rest of a step with grammars, on all ranks."""
        with self._together():
            self._tell(allowed)
            return self.own.verify(step, allowed)

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a step; the results are those of all ranks."""
        with self._together():
            result = self.own.collect(pending)
            if self._same_steps is not None:
                self._same_steps.check(result)
        return result

    def _tell(self, message: StepPlan | AllowedTokens) -> None:
        sent = self._others.send(message)
        if self._same_steps is not None:
            self._same_steps.add(sent)

    @contextmanager
    def _together(self) -> Generator[None, None, None]:
        try:
            yield
        except BaseException as error:
            self._others.give_up(error)


StepRunner = ModelRunner | ParallelRunner
