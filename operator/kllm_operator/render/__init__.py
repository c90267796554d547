"""Manifests of what the operator makes, as plain documents. Pure: no clock, I/O or randomness."""
