"""
Proof that a recording does what the uncaptured function does, before the recording is used.
"""
