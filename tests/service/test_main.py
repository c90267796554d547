"""`kllm-operator` as a command, without a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from substrate.polling import polled

from kllm_operator.main import Operator, main

_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: secret}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "operator.yaml"
    path.write_text("images: {engine: {image: e}, router: {image: r}}\n")
    return path


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for flag in ("--config", "--kubeconfig", "--namespace", "--listen", "--log-level"):
        assert flag in told


@pytest.mark.parametrize("arguments", [[], ["--config", "x", "--listen", "nonsense"], ["--config", "x", "--bogus"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_settings_that_cannot_be_read_end_it_with_one_line(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml: cannot be read" in capsys.readouterr().err


def test_without_a_way_to_the_api_server_it_says_what_was_tried(settings, tmp_path, capsys):
    assert main(["--config", str(settings), "--kubeconfig", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("queue", "ticking", "trouble", "why"),
    [
        ((500.0, 500.0), 1700.0, "", ""),
        ((700.0, 0.0), 0.0, "", "a reconcile has lasted 700 s"),
        ((0.0, 700.0), 0.0, "", "no reconcile was begun for 700 s while some were wanted"),
        ((0.0, 0.0), 2000.0, "", "a tick of a control loop has lasted 2000 s"),
        ((0.0, 0.0), 0.0, "no watch told of anything", "no watch told of anything"),
    ],
)
def test_it_is_dead_when_one_of_its_parts_goes_on_no_more(queue, ticking, trouble, why):
    longest, stalled = queue
    operator = SimpleNamespace(
        _queue=SimpleNamespace(longest_seconds=longest, stalled_seconds=stalled),
        _keeper=SimpleNamespace(ticking_seconds=ticking),
        _informer=SimpleNamespace(trouble=trouble),
    )
    assert Operator._why_dead(operator) == why


@pytest.mark.parametrize("elects", [True, False])
async def test_it_lives_unready_while_the_server_is_away_and_ends_at_sigterm(settings, tmp_path, elects):
    """The server is away from the first moment on, which is no reason to be restarted."""
    settings.write_text(f"{settings.read_text()}leaderElection: {{enabled: {str(elects).lower()}}}\n")
    refused = []

    async def refuse(request):
        refused.append(request.path)
        return web.Response(status=503, text="away")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(_KUBECONFIG.format(port=runner.addresses[0][1]))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kllm_operator.main", "--config", str(settings), "--kubeconfig", str(kubeconfig),
        "--listen", f"127.0.0.1:{port}",
        env=os.environ | {"POD_NAMESPACE": "system"},
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
            await polled(lambda: refused)
            answers = {}
            for path in ("/livez", "/readyz", "/metrics"):
                async with client.get(path) as response:
                    answers[path] = (response.status, await response.text())
            assert answers["/livez"] == (200, "ok")
            assert answers["/readyz"] == (503, "the caches are not filled yet")
            assert f"kllm_operator_leader {0.0 if elects else 1.0}" in answers["/metrics"][1]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await runner.cleanup()
