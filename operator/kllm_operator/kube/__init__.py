"""The API server: calls, caches, the work queue and the lease. No other room talks to it."""
