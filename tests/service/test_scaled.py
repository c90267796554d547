"""What a control loop is told of a spec."""

from service.service_world import service

from kllm_core.kinds.manifest import check_service
from kllm_operator.service.scaled import scaled_of


def test_limits_are_those_of_the_spec():
    document = service()
    document["spec"] |= {"gpuBudget": 5, "scaling": "External", "rollout": {"surge": 0, "maxUnavailable": 2}}
    document["spec"]["prefill"] |= {"minReplicas": 1, "maxReplicas": 3, "slots": 2}
    scaled = scaled_of(check_service(document))

    assert scaled.advise_only
    limits = scaled.limits
    assert (limits.gpu_budget, limits.surge, limits.max_unavailable) == (5, 0, 2)
    prefill = limits.prefill
    assert (prefill.min_replicas, prefill.max_replicas, prefill.slots) == (1, 3, 2)
