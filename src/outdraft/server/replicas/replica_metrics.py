"""Metrics of all replicas in one place: those of one engine, and a label more."""

from collections.abc import Callable, Collection, Iterable

from prometheus_client import Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outdraft.server.messages import Steps
from outdraft.server.metrics import LatencyWatcher, Metrics, Series
from outdraft.server.process_client import Supervisor

BY = ("prefix", "load")


class ReplicaMetrics:
    """Counts what a pool and its replicas do.

    A replica's label is its place, a small number. The replica that replaces it goes on with the
    same counters.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._watchers: list[LatencyWatcher] = []
        self._step_watchers: list[Callable[[Steps], None]] = []
        self._replicas: dict[int, Metrics] = {}
        self._newest: dict[int, Steps] = {}
        self._series = series = Series(model_name, {})
        self.registry = series.registry
        self.registry.register(_Merged(self._replicas))
        series.define(Gauge, {"replicas": ((), "Replicas that are ready.")})
        series.define(
            Counter,
            {
                "routed_requests": (
                    ("replica", "by"),
                    "Requests sent to a replica, by why: prefix (it has the beginning of the "
                    "prompt) or load (it has least to compute).",
                ),
                "retried_requests": ((), "Requests sent again because their replica was lost."),
            },
        )

    @property
    def all(self) -> Collection[Metrics]:
        """Metrics of each replica there has been, by its place."""
        return self._replicas.values()

    def watch(self, watcher: LatencyWatcher) -> None:
        """Tell it of the latencies that come."""
        self._watchers.append(watcher)
        for metrics in self.all:
            metrics.watch(watcher)

    def watch_steps(self, on_steps: Callable[[Steps], None]) -> None:
        """Have a function called with the steps of each report, and the load of all replicas."""
        self._step_watchers.append(on_steps)

    def joined(self, place: int, client: Supervisor) -> None:
        """A replica is ready, at a place that no other one has now."""
        if (metrics := self._replicas.get(place)) is None:
            metrics = self._replicas[place] = Metrics(client.info, self._model_name)
            for watcher in self._watchers:
                metrics.watch(watcher)
            for by in BY:
                self._series.add("routed_requests", 0, place, by)
        client.observe(metrics)
        client.watch(lambda steps: self._observe(place, steps))
        self._series.add("replicas", 1)

    def left(self, place: int) -> None:
        """It has ended."""
        nothing = Steps([], 0, 0, 0.0)
        self._replicas[place].observe_steps(nothing)
        self._newest.pop(place, None)
        self._series.add("replicas", -1)

    def routed(self, place: int, num_matched: int) -> None:
        """A request was sent to it; it knows `num_matched` blocks of the prompt."""
        by = BY[0] if num_matched else BY[1]
        self._series.add("routed_requests", 1, place, by)

    def retried(self) -> None:
        """A request was lost before it brought anything, and is sent again."""
        self._series.add("retried_requests", 1)

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation of all together; NaN before the first token."""
        known = [one.plain_tokens_per_s for one in self.all]
        measured = [speed for speed in known if speed == speed]
        return sum(measured) if measured else float("nan")

    def _observe(self, place: int, steps: Steps) -> None:
        self._newest[place] = steps
        newest = self._newest.values()
        news = Steps(
            steps.steps,
            sum(one.num_running for one in newest),
            sum(one.num_waiting for one in newest),
            sum(one.kv_usage for one in newest) / len(newest),
        )
        for on_steps in self._step_watchers:
            on_steps(news)


class _Merged(Collector):
    """The metrics of several registries with the same names, with `replica` as a further label."""

    def __init__(self, replicas: dict[int, Metrics]) -> None:
        self._replicas = replicas

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for place, metrics in self._replicas.items():
            for family in metrics.registry.collect():
                one = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(place)}
                    one.samples.append(sample._replace(labels=labels))
        return merged.values()
