"""
Candidates: no graph, or a graph together with a binding, which says how the external inputs of
a call reach the graph.
"""

# Run the function uncaptured.
NO_GRAPH = "no_graph"
# Copy the external inputs to fixed addresses, as CUDA graph trees do.
COPY = "copy"
# The host sets the parameters of the nodes that hold an address.
NODE_UPDATE = "node_update"
# The graph's first node sets them, or what it cannot set, the host.
PRELUDE = "prelude"
# The graph's first node writes a table from which Triton kernels load their pointers. This
# candidate is only ever forced.
TABLE = "table"

# Candidates that bind external inputs by address.
BINDINGS = (NODE_UPDATE, PRELUDE, TABLE)
CANDIDATES = (NO_GRAPH, COPY, *BINDINGS)

# No candidate was chosen yet.
UNDECIDED = "undecided"
