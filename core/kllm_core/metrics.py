"""Metric names and bucket bounds that more than one component uses. Pure."""

ROUTER_PREFIX = "kllm_router"
ENGINE_PREFIX = "kllm_engine"
OPERATOR_PREFIX = "kllm_operator"

LATENCY_BOUNDS_SECONDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3,
    0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""Upper bounds of every latency histogram, TTFT and TPOT included, so that they can be added up and compared."""
