"""Contracts of the router."""
