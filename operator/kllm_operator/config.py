"""The operator's own settings: one YAML file, which the chart renders from its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kllm_operator.loop.settings import LoopSettings, SettingError

_MOST_BYTES = 1 << 20
_MOST_NAMESPACES = 100


class ConfigError(ValueError):
    """The file cannot be used; one line per problem, each with the field and what was expected."""


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, validate_by_name=True)


class ImageSection(_Part):
    """An image that pods run."""

    image: str = Field(min_length=1, max_length=512)
    """With its tag or digest."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the kubelet pulls it, IfNotPresent: tags of releases do not move."""


class ImagesSection(_Part):
    """Images of all pods that the operator makes."""

    engine: ImageSection
    router: ImageSection


class EngineSection(_Part):
    """What all engine pods share."""

    command: tuple[str, ...] = Field(("kllm-engine",), min_length=1)
    """The engine's program in its image."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Pod template under that of each service: hostPath mounts, tolerations and the like."""
    drain_seconds: float = Field(30.0, gt=0, le=3600)
    """Seconds that an engine has to finish its requests when its pod is ended, 30. Shorter cuts more streams, which are
    continued elsewhere; longer holds nodes up that are to be drained."""
    pace: str | None = None
    """How long engine steps are made to last, for tests of scaling without accelerators; None: as they are."""


class RouterSection(_Part):
    """What all router pods share."""

    command: tuple[str, ...] = Field(("kllm-router",), min_length=1)
    """The router's program in its image."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Pod template under that of each service."""
    lame_duck_seconds: float = Field(5.0, ge=0, le=300)
    """Seconds for which a router that is to end goes on taking requests, 5: until nobody sends it any."""
    drain_seconds: float = Field(60.0, gt=0, le=3600)
    """Seconds that it then has for the streams that it carries, 60."""
    workers: int = Field(1, ge=1, le=64)
    """Processes of each router, 1."""
    access_log: bool = False
    """Whether routers log each answer on standard output."""


class RedisSection(_Part):
    """Where routers of a service tell each other what they have in flight; one of `url` and `secretName`."""

    url: str | None = Field(None, pattern=r"^rediss?://[^@/?#\s]+(/[0-9]+)?$", max_length=512)
    """redis[s]://HOST[:PORT][/DATABASE], without user and password, which belong into a secret."""
    secret_name: str | None = Field(None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
    """Of a secret in each service's namespace that holds such a URL, with USER:PASSWORD@ before the host. Routers of a
    namespace without it share nothing until it is there."""
    secret_key: str = Field("url", pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)
    """Of that secret."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.url is None) == (self.secret_name is None):
            raise ValueError("needs either url or secretName")
        return self


class NetworkSection(_Part):
    """Who may talk to whom; left out, no NetworkPolicies are made."""

    operator_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the operator's pods, which talk to agents and routers."""
    clients: tuple[dict[str, Any], ...] = ()
    """NetworkPolicyPeers that may send requests to routers; none: everyone may."""
    metrics: tuple[dict[str, Any], ...] = ()
    """NetworkPolicyPeers that may read metrics."""


class HistorySection(_Part):
    """Where what services' control loops decide from is written down, for `kllm replay`."""

    folder: str = Field(min_length=1, max_length=4096)
    """Of the files; they are as large as the volume that they are on allows, and as follows."""
    most_mebibytes: int = Field(512, ge=1, le=1_000_000)
    """Of all files together, 512; the oldest go first. A service with ten instances writes about 10 KB a tick, 170 MB a
    day."""
    file_mebibytes: int = Field(16, ge=1, le=1024)
    """Of one file, 16; a full one is followed by another, which is a history by itself."""


class ElectionSection(_Part):
    """Which replica acts."""

    enabled: bool = True
    """False only for one replica: it begins at once, and a second one would act against it."""
    lease_name: str = Field("kllm-operator", pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
    """Equal for all replicas of one installation."""
    namespace: str | None = None
    """Of the Lease; None is the operator's own, from POD_NAMESPACE."""


class OperatorConfig(_Part):
    """All of it."""

    images: ImagesSection
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets in the services' namespaces."""
    engine: EngineSection = Field(default_factory=EngineSection)
    router: RouterSection = Field(default_factory=RouterSection)
    redis: RedisSection | None = None
    """Left out, each router counts its own requests only."""
    network_policy: NetworkSection | None = None
    watch_namespaces: tuple[str, ...] = Field((), max_length=_MOST_NAMESPACES)
    """Namespaces whose services are kept; empty: all, which needs a ClusterRole."""
    leader_election: ElectionSection = Field(default_factory=ElectionSection)
    history: HistorySection | None = None
    """Left out, nothing is recorded."""
    loop: dict[str, float] = Field(default_factory=dict)
    """Settings of the control loop by name, as `kllm up --set` has them."""

    @field_validator("loop")
    @classmethod
    def _is_known(cls, values: dict[str, float]) -> dict[str, float]:
        try:
            LoopSettings().with_values(values)
        except SettingError as error:
            raise ValueError(str(error)) from None
        return values

    @property
    def loop_settings(self) -> LoopSettings:
        """Settings of every service's loop."""
        return LoopSettings().with_values(dict(self.loop))


def read_config(path: Path) -> OperatorConfig:
    """Read the file.

    Raises:
        ConfigError: it cannot be read, is no YAML, or has wrong fields.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path}: larger than {_MOST_BYTES} bytes")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        return OperatorConfig.model_validate(document or {})
    except ValidationError as error:
        problems = (
            f"{path}: {'.'.join(str(part) for part in each['loc']) or 'document'}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise ConfigError("\n".join(problems)) from error
