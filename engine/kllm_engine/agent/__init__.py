"""The pod's main process: starts one engine, watches it, and tells routers and the operator about it.

It stays light: neither torch nor sglang is imported here.
"""
