"""Requests go where their prompts' beginnings are, loads stay close, and the dead get nothing."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from outdraft.server.replicas.router import PrefixRouter, Route

SLACK = 100


def hashes(text: str) -> list[bytes]:
    """Names of blocks of one letter each, the whole text before it included."""
    return [text[: end + 1].encode() for end in range(len(text))]


def router(num_replicas: int = 0, **options: int) -> PrefixRouter:
    result = PrefixRouter(**{"block_size": 1, "slack_tokens": SLACK, **options})
    for number in range(num_replicas):
        result.join(str(number))
    return result


def sent(to: PrefixRouter, text: str, num_tokens: int = 1, **options) -> Route:
    route = to.route(hashes(text), num_tokens, **options)
    assert route is not None
    return route


texts = st.text("ab", max_size=6)
tokens = st.integers(0, 300)


class Machine(RuleBasedStateMachine):
    """A router, and the plainest account of what it should know."""

    routes = Bundle("routes")

    def __init__(self) -> None:
        super().__init__()
        self.router = router()
        self.known: dict[str, set[bytes]] = {}  # by replica
        self.running: list[Route] = []
        self.num_joined = 0

    @rule()
    def join(self) -> None:
        name = str(self.num_joined)
        self.num_joined += 1
        self.router.join(name)
        self.known[name] = set()

    @rule(data=st.data())
    def leave(self, data) -> None:
        if self.known:
            name = data.draw(st.sampled_from(sorted(self.known)))
            self.router.leave(name)
            del self.known[name]

    @rule(target=routes, text=texts, num_tokens=tokens, data=st.data())
    def route(self, text, num_tokens, data) -> Route | None:
        avoided = data.draw(st.sets(st.sampled_from([*sorted(self.known), "gone"])))
        loads = {name: self.router.load_tokens(name) for name in self.known}
        allowed = set(self.known) - avoided or set(self.known)
        route = self.router.route(hashes(text), num_tokens, avoided)
        if route is None:
            assert not self.known
            return None
        matched = {
            name: next(
                (i for i, one in enumerate(hashes(text)) if one not in self.known[name]), len(text)
            )
            for name in allowed
        }
        least = min(loads[name] for name in allowed)
        assert route.replica in allowed
        assert route.num_matched == matched[route.replica]
        assert route.left_tokens == max(0, num_tokens - route.num_matched)
        # Whatever its prompt, nobody is sent to a replica that is far behind the others.
        assert loads[route.replica] <= 2 * least + SLACK
        if route.num_matched < max(matched.values()) or not route.num_matched:
            assert loads[route.replica] == least
        if least == max(loads.values()):
            assert route.num_matched == max(matched.values())
        self.known[route.replica].update(hashes(text))
        self.running.append(route)
        return route

    @rule(route=routes, num_tokens=tokens)
    def settle(self, route, num_tokens) -> None:
        if route is not None:
            self.router.settle(route, num_tokens)

    @rule(route=consumes(routes))
    def end(self, route) -> None:
        if route is not None:
            self.router.end(route)
            self.router.end(route)  # twice is once

    @invariant()
    def loads_are_what_the_requests_have_left(self) -> None:
        assert set(self.router.replicas) == set(self.known)
        for name in self.known:
            left = sum(route.left_tokens for route in self.running if route.replica == name)
            assert self.router.load_tokens(name) == left


TestMachine = Machine.TestCase


def test_prompts_with_one_beginning_meet_at_one_replica():
    to = router(4)
    first = sent(to, "system:one").replica
    assert {sent(to, f"system:{end}").replica for end in ("two", "three", "four")} == {first}
    assert sent(to, "another").replica != first


def test_an_overfull_replica_shares_what_it_has():
    to = router(2)
    first = sent(to, "prompt", SLACK + 1)
    second = sent(to, "prompt", 1)
    assert (second.replica != first.replica, second.num_matched) == (True, 0)
    to.end(first)
    assert sent(to, "prompt").num_matched == len("prompt")


@given(st.lists(st.integers(1, 50), max_size=40))
def test_requests_that_share_nothing_are_spread_by_what_they_need(sizes):
    to = router(3)
    for number, size in enumerate(sizes):
        sent(to, chr(200 + number), size)
    loads = [to.load_tokens(name) for name in to.replicas]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_replica_that_failed_a_request_gets_it_again_only_if_it_is_alone():
    to = router(2)
    first = sent(to, "prompt").replica
    second = sent(to, "prompt", avoided={first}).replica
    assert second != first
    to.leave(second)
    assert sent(to, "prompt", avoided={first}).replica == first
    to.leave(first)
    assert to.route(hashes("prompt"), 1) is None


def test_what_was_sent_long_ago_is_forgotten_from_its_end():
    to = router(1, max_blocks=4)
    sent(to, "abcd")
    assert sent(to, "xy").num_matched == 0
    assert sent(to, "abcd").num_matched == 2
