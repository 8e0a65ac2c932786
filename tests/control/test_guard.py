"""The guard stops what loses, lets alone what wins, and is patient in between."""

import numpy as np

from outdraft.control.guard import FIRST_WAIT, Guard

NUM_STEPS = 3000


def watched(mean, seed, *, num_steps=NUM_STEPS, guard=None):
    """Steps until the alarm, None without one; gains as of one request with drafts of four."""
    guard = guard or Guard()
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        gain = mean + rng.choice([-1.2, -0.2, 0.8, 1.8], p=[0.4, 0.25, 0.2, 0.15]) + 0.1
        if guard.watch(gain, 1.3, predicted_gain=0.1):
            return step
    return None


def test_a_loss_of_a_fifth_is_stopped_within_two_hundred_steps():
    steps = [watched(-0.26, seed) for seed in range(20)]
    assert all(step is not None and step < 200 for step in steps)


def test_false_alarms_at_a_gain_of_a_tenth_cost_three_percent_of_the_steps_at_most():
    steps = [watched(0.13, seed, num_steps=1000) for seed in range(40)]
    alarms = [step for step in steps if step is not None]
    assert len(alarms) * FIRST_WAIT <= 0.03 * (sum(alarms) + 1000 * (40 - len(alarms)))


def test_the_wait_doubles_with_each_alarm_and_begins_anew_when_a_trial_wins():
    guard, waits = Guard(), []
    for seed in range(3):
        watched(-0.5, seed, guard=guard)
        waits.append(guard.waiting)
        guard.pass_by(guard.waiting)
    assert waits == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert watched(0.5, 3, num_steps=60, guard=guard) is None
    watched(-0.5, 4, guard=guard)
    assert guard.waiting == FIRST_WAIT


def test_good_evidence_ends_the_wait():
    guard = Guard()
    watched(-0.5, 0, guard=guard)
    guard.release()
    assert guard.waiting == 0
