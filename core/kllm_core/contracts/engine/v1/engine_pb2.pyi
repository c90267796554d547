from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_SLOT: _ClassVar[InstanceState]
    INSTANCE_STATE_GATED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_SERVING: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_FAILED: _ClassVar[InstanceState]

class Binding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BINDING_UNSPECIFIED: _ClassVar[Binding]
    BINDING_LATE: _ClassVar[Binding]
    BINDING_EARLY: _ClassVar[Binding]
    BINDING_JUST_IN_TIME: _ClassVar[Binding]

class CacheTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_TIER_UNSPECIFIED: _ClassVar[CacheTier]
    CACHE_TIER_DEVICE: _ClassVar[CacheTier]
    CACHE_TIER_HOST: _ClassVar[CacheTier]
    CACHE_TIER_DISK: _ClassVar[CacheTier]
    CACHE_TIER_SHARED: _ClassVar[CacheTier]

class RequestEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_EVENT_KIND_UNSPECIFIED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_PREFILL_DONE: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_REQUEUED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_RELEASED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_FAILED: _ClassVar[RequestEventKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_SLOT: InstanceState
INSTANCE_STATE_GATED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_SERVING: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_FAILED: InstanceState
BINDING_UNSPECIFIED: Binding
BINDING_LATE: Binding
BINDING_EARLY: Binding
BINDING_JUST_IN_TIME: Binding
CACHE_TIER_UNSPECIFIED: CacheTier
CACHE_TIER_DEVICE: CacheTier
CACHE_TIER_HOST: CacheTier
CACHE_TIER_DISK: CacheTier
CACHE_TIER_SHARED: CacheTier
REQUEST_EVENT_KIND_UNSPECIFIED: RequestEventKind
REQUEST_EVENT_KIND_PREFILL_DONE: RequestEventKind
REQUEST_EVENT_KIND_REQUEUED: RequestEventKind
REQUEST_EVENT_KIND_RELEASED: RequestEventKind
REQUEST_EVENT_KIND_FAILED: RequestEventKind

class GetInstanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Instance(_message.Message):
    __slots__ = ("instance_id", "service", "role", "state", "message", "incarnation", "http_address", "bootstrap_host", "bootstrap_port", "model_name", "page_size", "kv_type", "context_tokens", "kv_total_tokens", "max_running_requests", "engine_version", "bindings", "binding_reason", "flippable", "start_phases", "pacing")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_HOST_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_PORT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    BINDING_REASON_FIELD_NUMBER: _ClassVar[int]
    FLIPPABLE_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    PACING_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    service: str
    role: Role
    state: InstanceState
    message: str
    incarnation: int
    http_address: str
    bootstrap_host: str
    bootstrap_port: int
    model_name: str
    page_size: int
    kv_type: str
    context_tokens: int
    kv_total_tokens: int
    max_running_requests: int
    engine_version: str
    bindings: _containers.RepeatedScalarFieldContainer[Binding]
    binding_reason: str
    flippable: bool
    start_phases: _containers.RepeatedCompositeFieldContainer[StartPhase]
    pacing: str
    def __init__(self, instance_id: _Optional[str] = ..., service: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., message: _Optional[str] = ..., incarnation: _Optional[int] = ..., http_address: _Optional[str] = ..., bootstrap_host: _Optional[str] = ..., bootstrap_port: _Optional[int] = ..., model_name: _Optional[str] = ..., page_size: _Optional[int] = ..., kv_type: _Optional[str] = ..., context_tokens: _Optional[int] = ..., kv_total_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., engine_version: _Optional[str] = ..., bindings: _Optional[_Iterable[_Union[Binding, str]]] = ..., binding_reason: _Optional[str] = ..., flippable: _Optional[bool] = ..., start_phases: _Optional[_Iterable[_Union[StartPhase, _Mapping]]] = ..., pacing: _Optional[str] = ...) -> None: ...

class StartPhase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval_milliseconds", "deltas")
    INTERVAL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    interval_milliseconds: int
    deltas: bool
    def __init__(self, interval_milliseconds: _Optional[int] = ..., deltas: _Optional[bool] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("sequence", "incarnation", "age_seconds", "role", "state", "running_requests", "queued_requests", "queued_tokens", "queued_uncached_tokens", "parked_requests", "parked_tokens", "parked_limit_tokens", "kv_used_tokens", "kv_evictable_tokens", "kv_total_tokens", "kv_high_water_tokens", "transferring_requests", "retracted_requests", "prefill_step_seconds", "decode_step_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "max_running_requests", "total_prefill_tokens", "total_decode_tokens", "total_prefill_busy_seconds", "message", "accept_length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PARKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_LIMIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_EVICTABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_HIGH_WATER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PREFILL_BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    incarnation: int
    age_seconds: float
    role: Role
    state: InstanceState
    running_requests: int
    queued_requests: int
    queued_tokens: int
    queued_uncached_tokens: int
    parked_requests: int
    parked_tokens: int
    parked_limit_tokens: int
    kv_used_tokens: int
    kv_evictable_tokens: int
    kv_total_tokens: int
    kv_high_water_tokens: int
    transferring_requests: int
    retracted_requests: int
    prefill_step_seconds: float
    decode_step_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    max_running_requests: int
    total_prefill_tokens: int
    total_decode_tokens: int
    total_prefill_busy_seconds: float
    message: str
    accept_length: float
    def __init__(self, sequence: _Optional[int] = ..., incarnation: _Optional[int] = ..., age_seconds: _Optional[float] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., queued_uncached_tokens: _Optional[int] = ..., parked_requests: _Optional[int] = ..., parked_tokens: _Optional[int] = ..., parked_limit_tokens: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_evictable_tokens: _Optional[int] = ..., kv_total_tokens: _Optional[int] = ..., kv_high_water_tokens: _Optional[int] = ..., transferring_requests: _Optional[int] = ..., retracted_requests: _Optional[int] = ..., prefill_step_seconds: _Optional[float] = ..., decode_step_seconds: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_tokens_per_second: _Optional[float] = ..., max_running_requests: _Optional[int] = ..., total_prefill_tokens: _Optional[int] = ..., total_decode_tokens: _Optional[int] = ..., total_prefill_busy_seconds: _Optional[float] = ..., message: _Optional[str] = ..., accept_length: _Optional[float] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ("incarnation", "from_sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    from_sequence: int
    def __init__(self, incarnation: _Optional[int] = ..., from_sequence: _Optional[int] = ...) -> None: ...

class CacheUpdate(_message.Message):
    __slots__ = ("sequence", "incarnation", "snapshot", "stored", "removed", "cleared")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    incarnation: int
    snapshot: CacheSnapshot
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: CacheCleared
    def __init__(self, sequence: _Optional[int] = ..., incarnation: _Optional[int] = ..., snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("tier", "blocks", "first", "last")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    tier: CacheTier
    blocks: _containers.RepeatedScalarFieldContainer[int]
    first: bool
    last: bool
    def __init__(self, tier: _Optional[_Union[CacheTier, str]] = ..., blocks: _Optional[_Iterable[int]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: CacheTier
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[_Union[CacheTier, str]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: CacheTier
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[_Union[CacheTier, str]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "kind", "incarnation", "prompt_tokens", "cached_tokens", "queue_seconds", "prefill_seconds", "parked_seconds", "reason", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARKED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: RequestEventKind
    incarnation: int
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    parked_seconds: float
    reason: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[_Union[RequestEventKind, str]] = ..., incarnation: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., parked_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_milliseconds",)
    DEADLINE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    deadline_milliseconds: int
    def __init__(self, deadline_milliseconds: _Optional[int] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("remaining_requests", "drained", "deadline_passed")
    REMAINING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_PASSED_FIELD_NUMBER: _ClassVar[int]
    remaining_requests: int
    drained: bool
    deadline_passed: bool
    def __init__(self, remaining_requests: _Optional[int] = ..., drained: _Optional[bool] = ..., deadline_passed: _Optional[bool] = ...) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ("switch_seconds", "incarnation")
    SWITCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    switch_seconds: float
    incarnation: int
    def __init__(self, switch_seconds: _Optional[float] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AssumeRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class AssumeResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: InstanceState
    def __init__(self, state: _Optional[_Union[InstanceState, str]] = ...) -> None: ...
