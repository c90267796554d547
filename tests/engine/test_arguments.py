"""SGLang's arguments follow from the instance's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kllm_core.objectives import Role
from kllm_engine.messages import PACE_VARIABLE
from kllm_engine.pace import parse_pace
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


@pytest.mark.parametrize("role", list(Role))
def test_an_instance_that_may_switch_gets_both_roles_arguments_and_decodes_prefix_cache(role):
    started = launch(settings(role, kv_events_endpoint="ipc:///run/x.kv", flippable=True))
    assert started.flip_obstacle == ""
    for name in (
        "enable-pd-role-switch",
        "disaggregation-bootstrap-port",
        "optimistic-prefill-attempts",
        "kv-events-config",
        "disaggregation-decode-retraction-backup",
        "disaggregation-decode-enable-radix-cache",
    ):
        assert f"--{name}" in started.arguments
    assert value(started.arguments, "disaggregation-mode") == role.value
    assert value(started.arguments, "disaggregation-decode-extra-slots") == "32"


def test_an_instance_without_a_prefix_cache_may_switch_without_decodes():
    started = launch(settings(flippable=True, engine_args={"disable-radix-cache": True}))
    assert started.flip_obstacle == ""
    assert "--disaggregation-decode-enable-radix-cache" not in started.arguments


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"speculative-algorithm": "EAGLE"}, "speculative decoding (speculative-algorithm in engineArgs)"),
        ({"enable-dp-attention": True}, "DP attention"),
        ({"decode-context-parallel-size": 2}, "context parallelism"),
        ({"pp-size": 2}, "pipeline parallelism"),
        ({"attn-cp-size": 2}, "context parallelism of prefill"),
        ({"enable-hierarchical-cache": True}, "hierarchical cache"),
        ({"disaggregation-decode-enable-radix-cache": False}, "disaggregation-decode-enable-radix-cache"),
    ],
)
def test_what_excludes_a_switch_is_named_and_the_instance_keeps_its_role(engine_args, words):
    started = launch(settings(Role.DECODE, flippable=True, engine_args=engine_args))
    assert words in started.flip_obstacle
    assert "--enable-pd-role-switch" not in started.arguments
    assert "--disaggregation-bootstrap-port" not in started.arguments


def test_an_instance_whose_other_role_excludes_a_switch_keeps_its_role():
    started = launch(settings(flippable=True, other_engine_args={"speculative-algorithm": "EAGLE"}))
    assert "speculative decoding" in started.flip_obstacle
    assert "--speculative-algorithm" not in started.arguments


@pytest.mark.parametrize(
    "engine_args", [{"enable-dp-attention": False}, {"decode-context-parallel-size": 1}, {"moe-a2a-backend": "none"}]
)
def test_what_is_turned_off_excludes_nothing(engine_args):
    assert launch(settings(flippable=True, engine_args=engine_args)).flip_obstacle == ""


def test_a_pace_is_passed_on_as_it_reads():
    pace = parse_pace("prefill=0.5,decode=0.03+0.002b")
    assert parse_pace(launch(settings(pace=pace)).environment[PACE_VARIABLE]) == pace
    assert PACE_VARIABLE not in launch(settings()).environment


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


def test_a_value_that_looks_like_a_flag_is_no_flag():
    arguments = launch(settings(api_key="-secret")).arguments
    assert "--api-key=-secret" in arguments
    assert "-secret" not in arguments


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
    for name in ("torch_native", "--disable-cuda-graph", "--disable-overlap-schedule"):
        assert name not in made.arguments
    assert "SGLANG_USE_CPU_ENGINE" not in made.environment


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_engine_sleeps_when_idle_and_decode_pins_no_host_memory(device):
    arguments = launch(settings(Role.DECODE, device=device)).arguments
    assert "--sleep-on-idle" in arguments
    assert value(arguments, "disaggregation-decode-retraction-backup") == "cpu_tensor"


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
