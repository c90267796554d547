"""The operator's settings file: what is refused names the field."""

from __future__ import annotations

import pytest
import yaml

from kllm_operator.config import ConfigError, read_config
from kllm_operator.main import render_config
from kllm_operator.render.config import RedisConfig

LEAST = {"images": {"engine": {"image": "engine:1"}, "router": {"image": "router:1"}}}


def read(tmp_path, document):
    path = tmp_path / "operator.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return read_config(path)


def test_everything_but_the_images_has_a_default(tmp_path):
    config = read(tmp_path, LEAST)
    assert config.leader_election.enabled
    assert config.watch_namespaces == ()
    rendered = render_config(config)
    assert rendered.engine.image == "engine:1"
    assert rendered.engine.command == ("kllm-engine",)
    assert rendered.router.image == "router:1"
    assert rendered.network is None
    assert rendered.router.redis is None


@pytest.mark.parametrize(
    ("section", "redis"),
    [
        ({"url": "rediss://cache:7000/1"}, RedisConfig("rediss://cache:7000/1")),
        ({"secretName": "cache", "secretKey": "it"}, RedisConfig(None, "cache", "it")),
    ],
)
def test_where_redis_is_reaches_the_renderers(tmp_path, section, redis):
    assert render_config(read(tmp_path, LEAST | {"redis": section})).router.redis == redis


def test_what_the_chart_writes_reaches_the_renderers(tmp_path, monkeypatch):
    monkeypatch.setenv("POD_NAMESPACE", "system")
    config = read(
        tmp_path,
        {
            "images": {"engine": {"image": "e:2", "pullPolicy": "Never"}, "router": {"image": "r:2"}},
            "imagePullSecrets": ["registry"],
            "engine": {"command": ["python", "-m", "x"], "drainSeconds": 7, "pace": "p", "template": {"spec": {}}},
            "router": {"lameDuckSeconds": 1, "drainSeconds": 2},
            "networkPolicy": {"operatorLabels": {"a": "b"}, "clients": [{"podSelector": {}}]},
            "loop": {"tick_seconds": 1},
        },
    )
    rendered = render_config(config)
    assert (rendered.engine.pull_policy, rendered.engine.drain_seconds, rendered.engine.pace) == ("Never", 7, "p")
    assert rendered.engine.command == ("python", "-m", "x")
    assert rendered.engine.pull_secrets == rendered.router.pull_secrets == ("registry",)
    assert (rendered.router.lame_duck_seconds, rendered.router.drain_seconds) == (1, 2)
    assert rendered.network is not None
    assert rendered.network.operator_namespace == "system"
    assert rendered.network.clients == ({"podSelector": {}},)
    assert config.loop_settings.tick_seconds == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"imagse": {}}, "imagse"),
        ({"engine": {"drainSeconds": 0}}, "engine.drainSeconds"),
        ({"engine": {"command": []}}, "engine.command"),
        ({"loop": {"tick_secs": 1}}, "there is no setting 'tick_secs'"),
        ({"loop": {"tick_seconds": 0}}, "tick_seconds"),
        ({"images": {"engine": {"image": "e", "pullPolicy": "Sometimes"}, "router": {"image": "r"}}}, "pullPolicy"),
        ({"leaderElection": {"leaseName": "No Name"}}, "leaderElection.leaseName"),
        ({"watchNamespaces": "default"}, "watchNamespaces"),
        ({"redis": {}}, "redis: .*either url or secretName"),
        ({"redis": {"url": "redis://cache:1", "secretName": "cache"}}, "redis: .*either url or secretName"),
        ({"redis": {"url": "redis://:word@cache:1"}}, "redis.url"),
        ({"redis": {"url": "http://cache:1"}}, "redis.url"),
        ({"redis": {"secretName": "cache", "secretKey": "a/b"}}, "redis.secretKey"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, LEAST | change)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "\x00", ""])
def test_what_is_no_settings_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_config(tmp_path / "nowhere.yaml")
