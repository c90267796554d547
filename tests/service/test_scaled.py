"""What a control loop is told of a spec."""

import pytest
from service.service_world import service

from kllm_core.kinds.manifest import ManifestError, check_service
from kllm_core.labels import ENGINE_TIMING
from kllm_core.timing import PRIOR, DecodeTiming, EngineTiming, PrefillTiming
from kllm_operator.service.scaled import scaled_of


def test_limits_are_those_of_the_spec():
    document = service()
    document["spec"] |= {"gpuBudget": 5, "scaling": "External", "rollout": {"surge": 0, "maxUnavailable": 2}}
    document["spec"]["prefill"] |= {"minReplicas": 1, "maxReplicas": 3, "slots": 2}
    document["spec"]["decode"] = {"accelerator": {"count": 2, "pricePerGpuHour": 350}}
    scaled = scaled_of(check_service(document))

    assert scaled.advise_only
    limits = scaled.limits
    assert (limits.gpu_budget, limits.surge, limits.max_unavailable) == (5, 0, 2)
    prefill = limits.prefill
    assert (prefill.min_replicas, prefill.max_replicas, prefill.slots) == (1, 3, 2)
    assert (prefill.price, limits.decode.price) == (1.0, 350.0)
    assert limits.cost(1, 1) == 2 * 350.0


def test_learning_begins_with_the_timing_that_an_annotation_tells():
    document = service()
    assert scaled_of(check_service(document)).prior == PRIOR
    text = '{"prefill": {"a": 0.1, "b": 0.2, "k": 0.3}, "decode": {"a": 0.4, "b": 0.5, "c": 0.6}, "kv_tokens": 9}'
    document["metadata"]["annotations"] = {ENGINE_TIMING: text}
    scaled = scaled_of(check_service(document))
    assert scaled.prior == EngineTiming(PrefillTiming(0.1, 0.2, 0.3), DecodeTiming(0.4, 0.5, 0.6))
    assert scaled.timing is None


def test_an_annotation_that_tells_no_timing_is_refused_with_its_name():
    document = service()
    document["metadata"]["annotations"] = {ENGINE_TIMING: "fast"}
    with pytest.raises(ManifestError, match=r"metadata.annotations.kllm.io/engine-timing: it must be JSON"):
        check_service(document)
