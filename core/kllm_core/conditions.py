"""Condition types of the kinds' status, as states rather than transitions. Pure."""

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
