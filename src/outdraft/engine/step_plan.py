"""The first half of a step: who drafts, and what is computed. Engines and replays share it."""

from outdraft.core.scheduled import ScheduledStep
from outdraft.drafting.policy import DraftPolicy
from outdraft.scheduling.scheduler import Scheduler


def plan_step(scheduler: Scheduler, drafting: DraftPolicy) -> ScheduledStep:
    """The next step; its `works` are empty if there is nothing to do."""
    num_live = len(scheduler.running) + len(scheduler.waiting)
    num_running = min(num_live, scheduler.config.max_num_seqs)
    room = scheduler.room()
    choices = drafting.choose(scheduler.decoding_requests(), num_running, room)
    may_follow = drafting.may_follow(num_running)
    follows = drafting.follows if may_follow else None
    reads = drafting.may_read if may_follow and drafting.reads_prompts() else None
    return scheduler.schedule(choices, follows, reads)
