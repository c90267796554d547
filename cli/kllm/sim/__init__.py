"""Simulation of a service: the same planner, scheduling and policies on modelled engines."""
