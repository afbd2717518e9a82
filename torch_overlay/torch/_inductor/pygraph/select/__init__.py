"""
Selection: each function is timed uncaptured and as a graph in the program's own calls, and
deployed the way that measured fastest.
"""
