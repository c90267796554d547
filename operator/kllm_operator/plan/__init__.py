"""Desired counts of both pools, and the steps towards them. Pure: no clock, I/O or randomness."""
