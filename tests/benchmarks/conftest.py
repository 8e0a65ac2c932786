"""Benchmarks are scripts that import one another by name, as if run in their own folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
