"""Scaling laws of other systems, rebuilt from their published formulas, to compare the planner with."""
