"""Condition types of the kinds' status, as states rather than transitions, and their reasons. Pure."""

import enum


class ConditionType(enum.StrEnum):
    """`type` of a condition; Ready sums up the others."""

    READY = "Ready"
    ACCEPTED = "Accepted"
    MODEL_AVAILABLE = "ModelAvailable"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    PROGRESSING = "Progressing"
    SCALING_LIMITED = "ScalingLimited"
    BINDING_DEGRADED = "BindingDegraded"
    DEGRADED = "Degraded"
    PAUSED = "Paused"


class Reason(enum.StrEnum):
    """`reason` of a condition. Ready takes the reason of the condition that keeps it from being ready."""

    SERVING = "Serving"
    """Ready: a prefill instance, a decode instance and a router take requests."""

    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    """Accepted is False: only the operator can see what is wrong; the message names the fields."""
    TEMPLATE_REFUSED = "TemplateRefused"

    AVAILABLE = "Available"
    """Of the model or of the routers."""
    FETCHING = "Fetching"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    MODEL_UNUSABLE = "ModelUnusable"
    HUB_UNREACHABLE = "HubUnreachable"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_NOT_BOUND = "ClaimNotBound"
    FOLDER_NOT_FOUND = "FolderNotFound"
    DISK_FULL = "DiskFull"

    MINIMUM_READY = "MinimumReady"
    STARTING = "Starting"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INSTANCE_FAILING = "InstanceFailing"
    SCALED_TO_ZERO = "ScaledToZero"
    UNAVAILABLE = "Unavailable"

    SCALING = "Scaling"
    FLIPPING = "Flipping"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_STOPPED = "RolloutStopped"
    """The new revision does not come up; the old one goes on serving."""
    SETTLED = "Settled"

    WITHIN_LIMITS = "WithinLimits"
    MAX_REPLICAS_REACHED = "MaxReplicasReached"
    MIN_REPLICAS_REACHED = "MinReplicasReached"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    OUT_OF_BOUNDS = "OutOfBounds"
    """Under External: the replicas that someone wrote lie outside of minReplicas and maxReplicas."""

    AS_CONFIGURED = "AsConfigured"
    LATE_UNAVAILABLE = "LateUnavailable"
    """An engine cannot prefill before its decode instance is known, so requests are bound early."""

    AS_EXPECTED = "AsExpected"
    SLOTS_MISSING = "SlotsMissing"
    ROUTERS_APART = "RoutersApart"
    """Degraded: routers are to share through Redis what they do, and some cannot."""

    NOT_PAUSED = "NotPaused"
    PAUSED_BY_ANNOTATION = "PausedByAnnotation"

    APPLY_FAILED = "ApplyFailed"
    """Degraded: the API server refuses an object of the service; the message says which and why."""
    NAME_TAKEN = "NameTaken"
    """Degraded: an object that is not the service's has the name of one that is to be made. Of a standalone pool also
    Accepted is False: its service has such a pool already, or is an InferenceService."""
