"""The chart's configuration of Redis, read by a real one."""

from __future__ import annotations

from charts.chart_helpers import of_kind, render

from kllm_router.shared.address import parse_address


def test_a_redis_takes_the_configuration_and_asks_for_the_password_of_the_url(make_redis, tmp_path):
    (secret,) = of_kind(render({"redis": {"enabled": True}}), "Secret", "kllm-redis")
    data = secret["stringData"]
    file = tmp_path / "redis.conf"
    file.write_text(data["redis.conf"].replace("dir /data", f"dir {tmp_path}"))
    server = make_redis(password=parse_address(data["url"]).password, configuration=file)
    server.start()

    assert b"33554432" in server.ask("CONFIG", "GET", "maxmemory")
    assert b"volatile-ttl" in server.ask("CONFIG", "GET", "maxmemory-policy")
    server.password = ""
    assert server.ask("PING").startswith(b"-NOAUTH")
