"""Watches engines and routers, and joins what they tell into one immutable snapshot."""
