"""`kllm status`, `kllm down` and others, when something of a service is not as it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from kllm.main import app
from kllm_operator.substrate.identity import identify
from kllm_operator.substrate.rundir import ProcessRecord, RunDirectory, RunState

LOAD = {"term": "Tpot", "value": 0.5, "predicted": 0.5, "measured": None}
POOL = {"load": LOAD, "desired": 1, "ready": 1, "warming": 0, "draining": 0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run directory of a service that this process owns."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    run = RunDirectory("chat")
    run.path.mkdir(parents=True)
    (run.path / "lock").touch()
    run.token_file.write_text("x" * 32)
    return run


@contextlib.contextmanager
def router(*instances):
    """The address of a router that tells of these instances."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"instances": instances}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def write_state(run, url, **changes):
    me = identify(os.getpid())
    processes = tuple(
        ProcessRecord(name, kind, me.pid, me.started, "")
        for name, kind in (("chat-prefill-0", "prefill"), ("router-0", "router"))
    )
    state = RunState("chat", "0" * 32, me.pid, me.started, 0.0, "m", phase="Serving", url=url, processes=processes)
    (run.path / "state.json").write_text(dataclasses.replace(state, **changes).to_json())


def kllm(*arguments):
    return CliRunner().invoke(app, arguments)


def line_of(result, name):
    return next(line.split() for line in result.stdout.splitlines() if line.startswith(name))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"state": "Serving", "silent": False, "ejected_seconds": None}, ["Serving"]),
        ({"state": "Serving", "silent": True, "ejected_seconds": None}, ["silent"]),
        ({"state": "Serving", "silent": False, "ejected_seconds": 4.2}, ["ejected,", "4", "s"]),
        ({"state": "Failed", "silent": True, "ejected_seconds": 4.2}, ["Failed"]),
    ],
)
def test_an_instance_that_the_router_does_not_trust_is_not_shown_as_serving(run, said, shown):
    with router({"id": "chat-prefill-0", "role": "prefill", **said}) as url:
        write_state(run, url)
        result, rows = kllm("status"), json.loads(kllm("status", "--json").stdout)
    assert result.exit_code == 0
    assert line_of(result, "chat-prefill-0")[2 : 2 + len(shown)] == shown
    assert {name: rows[0][name] for name in said} == said


def test_the_role_is_the_present_one_and_not_that_of_the_name(run):
    with router({"id": "chat-prefill-0", "role": "decode", "state": "Serving"}) as url:
        write_state(run, url)
        result = kllm("status")
    assert line_of(result, "chat-prefill-0")[:3] == ["chat-prefill-0", "decode", "Serving"]


def test_a_router_that_does_not_answer_is_shown_as_such(run):
    write_state(run, "http://127.0.0.1:1")
    run.control_file.write_text(json.dumps({"instances": {}, "pools": {"decode": POOL}}))
    result = kllm("status")
    assert result.exit_code == 1
    assert line_of(result, "router-0")[:4] == ["router-0", "router", "not", "answering"]
    assert "the router of 'chat' is not answering at http://127.0.0.1:1" in result.stderr
    assert kllm("status", "--json").exit_code == 1


def test_a_router_that_is_being_stopped_is_not_asked(run):
    write_state(run, "http://127.0.0.1:1", phase="Stopping")
    result = kllm("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert line_of(result, "router-0")[2] == "Stopping"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"pools": {}}',
        json.dumps({"instances": [], "pools": {}}),
        json.dumps({"instances": {"chat-prefill-0": 1}, "pools": {}}),
        json.dumps({"instances": {}, "pools": {"decode": {**POOL, "ready": "one"}}}),
        json.dumps({"instances": {}, "pools": {"decode": {**POOL, "load": {**LOAD, "value": "high"}}}}),
    ],
)
def test_a_control_file_of_another_content_is_told_and_the_rest_is_shown(run, text):
    run.control_file.write_text(text)
    with router() as url:
        write_state(run, url)
        result = kllm("status")
    assert (result.exit_code, result.exception) == (0, None)
    assert f"{run.control_file} is not what the control loop writes there" in result.stderr
    assert line_of(result, "router-0")[2] == "Serving"


@pytest.mark.parametrize(
    "command", [("status",), ("down",), ("chat", "hello"), ("bench", "--rate", "1", "--duration", "9")]
)
def test_a_runtime_folder_that_is_a_file_is_told(tmp_path, monkeypatch, command):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(file))
    result = kllm(*command)
    assert result.exit_code == 2
    assert f"{file}/kllm cannot be read: Not a directory; set XDG_RUNTIME_DIR to a folder of yours" in result.stderr


@pytest.mark.parametrize("command", [("chat", "hello"), ("bench", "--rate", "1", "--duration", "9")])
def test_without_an_address_and_a_service_that_serves_nothing_is_asked(run, command):
    assert "nothing is up on this machine" in kllm(*command).stderr
    write_state(run, None, phase="Starting")
    result = kllm(*command)
    assert result.exit_code == 2
    assert "service 'chat' is still starting; see: kllm status" in result.stderr


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_service_without_a_readable_state_is_not_taken_for_none(run, text):
    if text is not None:
        (run.path / "state.json").write_text(text)
    known = f"service 'chat' is up (pid {os.getpid()}), but {run.path}/state.json is gone or cannot be read"
    with (run.path / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (("status",), ("status", "chat"), ("down",), ("down", "chat")):
            result = kllm(*command)
            assert (result.exit_code, result.stdout) == (1, "")
            assert known in result.stderr
        assert f"pid {os.getpid()} is no `kllm up`, so it is left alone" in kllm("down").stderr
        assert known in kllm("chat", "hello").stderr
    assert kllm("down").exit_code == 0
    assert kllm("status").exit_code == 2
