"""
Candidates: no graph, or a graph with a binding, which says how the external inputs of a call reach the graph, and a
schedule, which says what of the graph runs side by side.
"""

from __future__ import annotations

from typing import NamedTuple


# Run the function uncaptured.
NO_GRAPH = "no_graph"
# Copy the external inputs to fixed addresses, as CUDA graph trees do.
COPY = "copy"
# The host sets the parameters of the nodes that hold an address.
NODE_UPDATE = "node_update"
# The graph's first node sets them, or what it cannot set, the host.
PRELUDE = "prelude"

# Candidates that bind external inputs by address.
BINDINGS = (NODE_UPDATE, PRELUDE)
CANDIDATES = (NO_GRAPH, COPY, *BINDINGS)

# No candidate was chosen yet.
UNDECIDED = "undecided"

# All nodes in a row, as they were captured.
CHAIN = "chain"
# Each call starts when what it depends on has ended.
DAG = "dag"
# The calls in so many rows.
LANES = {"lanes2": 2, "lanes3": 3, "lanes4": 4}

SCHEDULES = (CHAIN, *LANES, DAG)


class Candidate(NamedTuple):
    """``binding`` is one of CANDIDATES. Only a graph that is bound has another schedule than CHAIN."""

    binding: str
    schedule: str = CHAIN

    def __str__(self) -> str:
        return self.binding if self.schedule == CHAIN else f"{self.binding},{self.schedule}"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Return the candidate of a name. Raises ValueError if there is none."""
        binding, comma, schedule = text.partition(",")
        is_bound = binding in BINDINGS
        if binding not in CANDIDATES or (comma and (schedule not in SCHEDULES or not is_bound)):
            names = ", ".join(CANDIDATES)
            raise ValueError(
                f"there is no candidate {text!r}: use one of {names}, "
                f"and for {', '.join(BINDINGS)} a comma and one of {', '.join(SCHEDULES)}"
            )
        return cls(binding, schedule or CHAIN)
