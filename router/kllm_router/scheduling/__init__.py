"""Which prefill and which decode instance serves a request. Pure."""
