"""What shares of their limits products and passes reach, and whether that meets the bars.

roofline.py measures them and prints them; report.py writes them for the document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

# By rows, the share that all products should reach; a whole pass may stay so much below it.
PRODUCT_BARS = {1: 0.85, 5: 0.80, 8: 0.80, 16: 0.65, 32: 0.65, 64: 0.65, 256: 0.60}
PASS_ALLOWANCE = 0.05
# How much longer than one row eight may take where bfloat16 is multiplied as it is.
RATIOS = {
    "products of 8 rows by 1": ("products, 8", "products, 1", 1.2),
    "8 requests by 1": ("pass, 8 requests", "pass, 1", 1.35),
}


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a limit, or a ratio of two times, which should be small.

    Attributes:
        best: by the shortest times.
        median: by the median times, with the limit of the machine's best moment.
        bar: None: there is none.
    """

    name: str
    best: float
    median: float
    bar: float | None
    is_ratio: bool = False

    @property
    def is_met(self) -> bool:
        assert self.bar is not None
        return self.best <= self.bar if self.is_ratio else self.best >= self.bar

    def number(self, value: float) -> str:
        return f"{value:.3f}" if self.is_ratio else f"{value:.1%}"

    @property
    def wanted(self) -> str:
        """The bar; empty: there is none."""
        if self.bar is None:
            return ""
        return f"at most {self.bar:g}" if self.is_ratio else f"{self.bar:.0%}"

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "met" if self.is_met else "missed"


def shares(result: dict[str, Any]) -> Iterator[Share]:
    """Those of everything in roofline.py's result, then the ratios of few rows.

    Only weights as they are have bars: quantised ones take less to read, and more to take apart.
    """
    samples_s, limits_s = result["samples_s"], result["limits_s"]
    has_bars = result["quantization"] is None
    for name, times_s in samples_s.items():
        limit_s = limits_s[name]
        bar = _bar(name) if has_bars else None
        yield Share(name, limit_s / min(times_s), limit_s / median(times_s), bar)
    has_bars = has_bars and _keeps_bf16(result)
    for name, (many, one, bar) in RATIOS.items():
        if many in samples_s and one in samples_s:
            best = min(samples_s[many]) / min(samples_s[one])
            middle = median(samples_s[many]) / median(samples_s[one])
            yield Share(name, best, middle, bar if has_bars else None, is_ratio=True)


def _bar(name: str) -> float | None:
    kind, rows = name.split(", ")
    bar = PRODUCT_BARS.get(int(rows)) if rows.isdigit() else None
    return bar if bar is None or kind == "products" else round(bar - PASS_ALLOWANCE, 2)


def _keeps_bf16(result: dict[str, Any]) -> bool:
    return result["dtype"] == "bfloat16" and result["library"].endswith(("-bf16", "-amx"))
