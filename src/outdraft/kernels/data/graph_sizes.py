"""Sizes of CUDA graphs, rounded up so that few graphs are made."""

TREE_ROWS = 256  # of a request; those with more are chunks of prompts
MOST_ROWS = 512  # of a pass that is a graph; more rows take longer than their launches
GRAPH_BYTES = 1 << 28  # that all graphs of a function share: arguments and results of one of them
GRAPHED_FUNCTIONS = 3  # growth, choices, and verification alone
PASS_BYTES = 1 << 26  # the same of the passes of one network
MOST_GRAPHS = 512  # of one function on one cache; each takes some 2 MB
_LEAST_LEN, _LEAST_GROWN_LEN = 512, 2048


def rounded_rows(num_rows: int) -> int:
    """The number of rows to pad to: few sizes, and few rows too many."""
    if num_rows <= 8:
        return _power_of_2(num_rows)
    step = 8 if num_rows <= 64 else 32 if num_rows <= 256 else 64
    return step * -(-num_rows // step)


def rounded_requests(num_requests: int) -> int:
    """The number of requests of a pass to pad to. Those without rows take hardly any time."""
    return _power_of_4(num_requests)


def rounded_len(num_tokens: int) -> int:
    """The length that a text counts as: it stays the same for long while the text grows."""
    return _power_of_2(max(num_tokens, _LEAST_LEN))


def rounded_grown_len(num_tokens: int) -> int:
    """The length that a text counts as where drafts grow: fewer sizes than `rounded_len` has.

    Few layers read drafts, so the padding costs little, and each graph takes long to make.
    """
    return _LEAST_GROWN_LEN * _power_of_4(-(-num_tokens // _LEAST_GROWN_LEN))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _power_of_4(number: int) -> int:
    return 1 << 2 * -(-(number - 1).bit_length() // 2)
