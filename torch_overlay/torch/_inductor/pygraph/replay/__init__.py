"""Replaying a recording in the steady state, by Python or by compiled code."""
