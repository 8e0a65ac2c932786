"""What is done once, and makes a step slow that later steps are not like."""

from dataclasses import dataclass


@dataclass(slots=True)
class FirstTimes:
    """How often something was done that is found done from then on: a kernel compiled for new
    sizes, a graph made."""

    number: int = 0
