"""Selection: each function is timed uncaptured and as a graph, and deployed the way that measured fastest."""
