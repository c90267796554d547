"""The engine: real SGLang with an agent that starts, watches and reports on it."""
