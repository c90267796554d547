"""Contracts of the engine."""
