"""How large the graphs of a GPU are at most."""

TREE_ROWS = 256  # of a request; those with more are prompt chunks, and are part of no graph
GRAPH_BYTES = 1 << 28  # that the arguments of all graphs of a function take together
GRAPHED_FUNCTIONS = 3  # growth, matching, verification
