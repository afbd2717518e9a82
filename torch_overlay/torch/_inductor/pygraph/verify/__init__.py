"""Proof that a recording does what the uncaptured function does, before it is used."""
