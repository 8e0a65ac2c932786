"""The wait of OpenMP threads for each other."""

from collections.abc import MutableMapping

SPIN_COUNT = "2000"  # turns; about 0.1 ms


def prepare_openmp(environ: MutableMapping[str, str]) -> None:
    """Bound how long idle threads spin; without effect once torch is imported.

    GNU's OpenMP lets them spin for several milliseconds. With a busy neighbour on the same cores
    that stalls every matrix product for as long: 12 ms instead of 1 ms was measured. Not to spin
    at all costs a wake-up for each of the hundreds of products of a step, so they spin a little.
    """
    if environ.keys().isdisjoint({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}):
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT
