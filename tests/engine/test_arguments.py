"""SGLang's arguments follow from the instance's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kllm_core.objectives import Role
from kllm_engine.sglang.arguments import ArgumentsError, EngineSettings, detect_device, import_environment, launch


def settings(role: Role = Role.PREFILL, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "role": role,
        "model_path": Path("/models/m"),
        "model_name": "chat",
        "http_port": 1,
        "bootstrap_port": 2,
        "distributed_port": 3,
        "device": "cpu",
        "api_key": "secret",
    }
    return EngineSettings(**(values | changes))


def value(arguments: tuple[str, ...], name: str) -> str | None:
    return arguments[arguments.index(f"--{name}") + 1] if f"--{name}" in arguments else None


def test_each_role_gets_only_its_own_arguments():
    prefill = launch(settings(kv_events_endpoint="ipc:///run/x.kv")).arguments
    decode = launch(settings(Role.DECODE, kv_events_endpoint="ipc:///run/x.kv")).arguments
    for name in ("disaggregation-bootstrap-port", "optimistic-prefill-attempts", "kv-events-config"):
        assert f"--{name}" in prefill
        assert f"--{name}" not in decode
    assert "--disaggregation-decode-retraction-backup" in decode
    assert "--disaggregation-decode-retraction-backup" not in prefill
    assert value(prefill, "disaggregation-mode") == "prefill"
    assert value(decode, "disaggregation-mode") == "decode"


def test_engine_args_replace_defaults_once():
    arguments = launch(
        settings(engine_args={"max-total-tokens": 4096, "sleep-on-idle": False, "enable-lora": True})
    ).arguments
    assert arguments.count("--max-total-tokens") == 1
    assert value(arguments, "max-total-tokens") == "4096"
    assert "--sleep-on-idle" not in arguments
    assert "--enable-lora" in arguments
    assert "True" not in arguments


@pytest.mark.parametrize("name", ["port", "api-key", "page-size", "disaggregation-mode"])
def test_engine_args_cannot_replace_what_follows_from_other_fields(name):
    with pytest.raises(ArgumentsError, match=name):
        launch(settings(engine_args={name: 1}))


def test_unknown_kv_type_is_named():
    with pytest.raises(ArgumentsError, match="FP3"):
        launch(settings(kv_type="FP3"))


def test_kv_events_carry_both_endpoints():
    made = launch(settings(kv_events_endpoint="ipc:///a", kv_replay_endpoint="ipc:///b")).arguments
    config = json.loads(value(made, "kv-events-config") or "")
    assert config == {"publisher": "zmq", "endpoint": "ipc:///a", "topic": "", "replay_endpoint": "ipc:///b"}


def test_sglangs_own_timeout_never_comes_before_the_park_timeout():
    environment = launch(settings(park_timeout_seconds=120.0)).environment
    assert int(environment["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"]) > 120 + 600
    assert environment["KLLM_PARK_TIMEOUT_SECONDS"] == "120"


def test_context_tokens_are_passed_on_and_bounded_on_the_cpu():
    assert value(launch(settings()).arguments, "context-length") == "8192"
    assert value(launch(settings(context_tokens=512)).arguments, "context-length") == "512"
    assert value(launch(settings(device="cuda")).arguments, "context-length") is None


def test_a_gpu_gets_no_cpu_arguments():
    made = launch(settings(Role.DECODE, device="cuda"))
    for name in ("torch_native", "--disable-cuda-graph", "cpu_tensor", "--sleep-on-idle"):
        assert name not in made.arguments
    assert "SGLANG_USE_CPU_ENGINE" not in made.environment


def test_health_never_generates():
    assert launch(settings()).environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_other_plugins_stay_out():
    assert import_environment("cpu")["SGLANG_PLUGINS"] == "kllm"


def test_secrets_are_not_in_representations():
    assert "secret" not in repr(settings())
    assert "secret" not in repr(launch(settings()))


def test_device_is_told_by_its_device_nodes(tmp_path):
    assert detect_device(tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert detect_device(tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert detect_device(tmp_path) == "cuda"
