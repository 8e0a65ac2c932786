"""The numbers of one Prometheus registry, by name."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "outdraft:"
Table = dict[str, tuple[Sequence[str], str]]  # labels beside model_name, and the text, by name


class Series:
    """Metrics behind our prefix, all with the label model_name.

    `known`: values of other labels, each of which is there before anything happened to it.
    """

    def __init__(self, model_name: str, known: dict[str, Sequence[object]]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._known = known
        self._metrics: dict[str, Any] = {}
        # To look up a metric by its labels takes the library longer than to count.
        self._bound: dict[tuple[str, tuple[object, ...]], Any] = {}

    def define(self, kind: type[Counter | Gauge | Histogram], table: Table, **options: Any) -> None:
        """Add metrics of a kind, which has the options."""
        for name, (labels, text) in table.items():
            names = ["model_name", *labels]
            metric = kind(PREFIX + name, text, names, registry=self.registry, **options)
            self._metrics[name] = metric
            for values in product(*(self._known.get(label, ()) for label in labels)):
                self._of(name, values)

    def add(self, name: str, count: float, *labels: object) -> None:
        self._of(name, labels).inc(count)

    def set(self, name: str, value: float, *labels: object) -> None:
        self._of(name, labels).set(value)

    def observe(self, name: str, value: float) -> None:
        self._of(name, ()).observe(value)

    def _of(self, name: str, labels: tuple[object, ...]) -> Any:
        bound = self._bound.get((name, labels))
        if bound is None:
            bound = self._metrics[name].labels(self._model_name, *map(str, labels))
            self._bound[name, labels] = bound
        return bound
