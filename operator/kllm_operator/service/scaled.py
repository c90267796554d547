"""What of a service's spec its control loop needs. Pure."""

from __future__ import annotations

from kllm_core.kinds.base import Scaling
from kllm_core.kinds.role import RoleSpec
from kllm_core.kinds.service import InferenceService
from kllm_core.timing import PRIOR, EngineTiming
from kllm_operator.loop.control import Scaled
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.members import Limits, PoolLimits


def scaled_of(
    service: InferenceService, *, timing: EngineTiming | None = None, start_seconds: float | None = None
) -> Scaled:
    """Objectives and limits.

    Args:
        service: the spec.
        timing: of the engines, if it is known beforehand and exactly.
        start_seconds: what a start took before; None is unknown.
    """
    spec = service.spec
    return Scaled(
        spec.objectives.objectives(),
        Limits(
            _limits(spec.prefill),
            _limits(spec.decode),
            spec.gpu_budget,
            surge=spec.rollout.surge,
            max_unavailable=spec.rollout.max_unavailable,
        ),
        advise_only=spec.scaling is Scaling.EXTERNAL,
        timing=timing,
        start_seconds=start_seconds,
        prior=service.timing or PRIOR,
    )


def with_chunks(settings: LoopSettings, service: InferenceService) -> LoopSettings:
    """The settings with the prefill step's size, if the spec gives one."""
    chunk = service.spec.prefill.engine_args.get("chunked-prefill-size")
    if isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0:
        return settings.with_values({"chunk_tokens": chunk})
    return settings


def _limits(role: RoleSpec) -> PoolLimits:
    accelerator = role.accelerator
    return PoolLimits(
        role.min_replicas,
        role.max_replicas,
        accelerator.count,
        slots=role.slots,
        price=accelerator.price_per_gpu_hour,
    )
