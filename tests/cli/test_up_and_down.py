"""`kllm up` and `kllm down`: what is refused, what is told, and that nothing is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from cli.cli_helpers import DRIVER, PATIENCE_SECONDS, Machine, listener
from substrate.substrate_helpers import wait_until


@pytest.fixture
def machine(tmp_path):
    """A machine on which nothing is left at the end."""
    machine = Machine(tmp_path)
    yield machine
    wait_until(lambda: machine.left() == [], seconds=5, what="nothing is left running")
    assert not [path for path in machine.runtime.rglob("*") if path.name in {"token", "state.json", "zygote.sock"}]
    machine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal_and_stops_fast(machine, number):
    with machine.up() as up:
        url = up.wait_for("serving")["url"]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            assert json.load(response)["data"][0]["id"] == "smollm2"
        assert len(machine.left()) == 5
        up.signal(number)
        status, _, seconds = up.end()
    assert status == 0
    assert seconds < 3
    assert machine.left() == []


def test_each_step_is_told_with_its_time(machine):
    with machine.up() as up:
        up.wait_for("serving")
        done = {event["name"]: event for event in up.events if event.get("state") == "done"}
        up.signal(signal.SIGTERM)
        up.end()
    assert done.keys() >= {"model", "router", "chat-prefill-0", "chat-decode-0"}
    assert all(event["seconds"] >= 0 for event in done.values())
    assert {"event": "step", "name": "model", "state": "running", "message": "unpacking 50%"} in up.events


@pytest.mark.parametrize("step", ["model", "chat-decode-0", "router"])
def test_a_signal_while_it_starts_stops_everything(machine, step):
    with machine.up() as up:
        up.wait_for("step", name=step, state="running")
        up.signal(signal.SIGINT)
        status, _, seconds = up.end()
    assert status in {0, 130}
    assert seconds < 3


def test_a_second_signal_ends_stubborn_processes_at_once(machine):
    with machine.up(FAKE_STUBBORN="1") as up:
        up.wait_for("serving")
        up.signal(signal.SIGINT)
        up.wait_for("step", name="stop")
        up.signal(signal.SIGINT)
        status, _, seconds = up.end()
    assert status == 0
    assert seconds < 2


def test_stubborn_processes_are_killed_after_a_short_grace(machine):
    with machine.up(FAKE_STUBBORN="1") as up:
        up.wait_for("serving")
        up.signal(signal.SIGINT)
        status, _, seconds = up.end()
    assert status == 0
    assert seconds < 4


def test_a_manifest_that_is_wrong_starts_nothing_and_each_problem_is_told(machine):
    machine.manifest.write_text(
        machine.manifest.read_text().replace("ttftMilliseconds", "ttftMiliseconds").replace("150", "0")
    )
    result = machine.kllm("up", "-f", str(machine.manifest))
    assert result.returncode == 2
    assert "did you mean 'ttftMilliseconds'" in result.stderr
    assert "spec.objectives.tpotMilliseconds" in result.stderr
    assert result.stdout == ""
    assert list(machine.runtime.iterdir()) == []


def test_a_missing_manifest_is_told(machine):
    result = machine.kllm("up", "-f", "missing.yaml")
    assert (result.returncode, result.stderr) == (2, "missing.yaml: cannot be read: No such file or directory\n")


def test_a_service_that_may_be_at_zero_begins_there_with_a_router_where_requests_wait(machine):
    text = machine.manifest.read_text() + "  prefill: {minReplicas: 0}\n  decode: {minReplicas: 0}\n"
    machine.manifest.write_text(text)
    with machine.up() as up:
        up.wait_for("serving")
        commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in machine.left()]
        assert not [each for each in commands if "agent" in each]
        router = next(each for each in commands if "--tokenizer" in each)
        assert router[router.index("--wait-for-start-seconds") + 1] == "600"
        assert machine.kllm("status").returncode == 0
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0


def test_a_port_in_use_is_refused_with_its_owner(machine):
    with listener() as port:
        result = machine.kllm("up", "-f", str(machine.manifest), "--port", str(port))
    assert result.returncode == 2
    assert f"port {port} is in use by " in result.stderr
    assert f"(pid {os.getpid()})" in result.stderr
    assert "choose another with --port PORT" in result.stderr


def test_a_port_in_use_by_another_service_is_refused_with_its_name(machine):
    with machine.up() as up:
        url = up.wait_for("serving")["url"]
        other = machine.folder / "other.yaml"
        other.write_text(machine.manifest.read_text().replace("name: chat", "name: other"))
        result = machine.kllm("up", "-f", str(other), "--port", url.rpartition(":")[2])
        assert result.returncode == 2
        assert "in use by the kllm service 'chat'" in result.stderr
        up.signal(signal.SIGTERM)
        up.end()


def test_equal_ports_and_a_file_without_keys_are_refused_before_anything_starts(machine):
    keys = machine.folder / "keys"
    keys.write_text(" \n")
    options = ["--port", "8123", "--grpc-port", "8123", "--api-key-file", str(keys)]
    result = machine.kllm("up", "-f", str(machine.manifest), *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert "kllm: --port and --grpc-port are both 8123; they must differ" in result.stderr
    assert f"kllm: --api-key-file: {keys} holds no key; leave the flag out to need none" in result.stderr
    assert list(machine.runtime.iterdir()) == []


def test_a_host_that_is_not_of_this_machine_is_refused(machine):
    result = machine.kllm("up", "-f", str(machine.manifest), "--host", "203.0.113.1")
    assert result.returncode == 2
    assert "203.0.113.1" in result.stderr


def test_the_same_service_twice_is_refused_and_the_first_goes_on(machine):
    with machine.up() as up:
        url = up.wait_for("serving")["url"]
        result = machine.kllm("up", "-f", str(machine.manifest))
        assert result.returncode == 2
        assert f"service 'chat' is already up at {url} (pid {up.process.pid})" in result.stderr
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5):
            pass
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0


@pytest.mark.parametrize("name", ["model", "zygote", "chat-decode-0", "router"])
def test_what_does_not_start_is_told_with_the_end_of_its_log(machine, name):
    with machine.up(FAKE_FAIL=name) as up:
        status, errors, _ = up.end()
    shown = "router-0" if name == "router" else name
    assert status == 1
    assert f"kllm: {shown} failed: out of luck" in errors
    assert "  | the reason is in the last line\n" in errors
    assert str(machine.runtime / "kllm" / "chat" / "logs" / f"{shown}.log") in errors


def kill(machine, name):
    rows = json.loads(machine.kllm("status", "--json").stdout)
    os.kill(next(row["pid"] for row in rows if row["id"] == name), signal.SIGKILL)


def test_an_instance_that_dies_is_named_and_replaced(machine):
    with machine.up() as up:
        up.wait_for("serving")
        kill(machine, "chat-prefill-0")
        up.wait_for("failure", instance="chat-prefill-0", message="was ended by SIGKILL")
        assert up.wait_for("action", step="Start", role="prefill")["instance"] == "chat-prefill-1"
        up.wait_for("capacity", instance="chat-prefill-1", role="prefill")
        rows = {row["id"] for row in json.loads(machine.kllm("status", "--json").stdout)}
        assert rows == {"chat-prefill-1", "chat-decode-0", "router-0", "zygote"}
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0


def test_an_instance_that_dies_again_and_again_is_replaced_ever_later(machine):
    with machine.up("--tune", "restart_first_seconds=0.2") as up:
        up.wait_for("serving")
        for number in range(3):
            kill(machine, f"chat-decode-{number}")
            up.wait_for("failure", instance=f"chat-decode-{number}")
            up.wait_for("capacity", instance=f"chat-decode-{number + 1}")
        then = [event["then"] for event in up.events if event["event"] == "failure"]
        assert then == [
            "is replaced at once",
            "is replaced in 0.2 s (2 failures in a row)",
            "is replaced in 0.4 s (3 failures in a row)",
        ]
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0


def test_nobody_has_to_read_what_it_tells(machine):
    """A pipe of one page is full after a few events."""
    command = [sys.executable, DRIVER, "up", "-f", str(machine.manifest), "--port", "0", "--json"]
    with subprocess.Popen(command, env=machine.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
        fcntl.fcntl(up.stdout, fcntl.F_SETPIPE_SZ, 4096)
        while json.loads(up.stdout.readline())["event"] != "serving":
            pass
        for number in range(3):
            kill(machine, f"chat-decode-{number}")
            wait_until(lambda name=f"chat-decode-{number + 1}": is_up(machine, name), what="a new instance")
        up.send_signal(signal.SIGTERM)
        up.stdout.read()
        assert up.wait(10) == 0


def is_up(machine, name):
    return name in {row["id"] for row in json.loads(machine.kllm("status", "--json").stdout)}


@pytest.mark.parametrize("name", ["router-0", "zygote"])
def test_what_nothing_goes_on_without_ends_the_service_and_is_named(machine, name):
    with machine.up() as up:
        up.wait_for("serving")
        kill(machine, name)
        status, errors, _ = up.end()
    assert status == 1
    assert f"kllm: {name} was ended by SIGKILL" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tune", "tick_second=1"], "there is no setting 'tick_second'; there are"),
        (["--tune", "tick_seconds"], "--tune 'tick_seconds' must be NAME=NUMBER"),
        (["--tune", "tick_seconds=0"], "tick_seconds must be at least 0.1, got 0"),
        (["--tune", "aim_below=2"], "scale_down_below < aim_below <= scale_up_above must hold"),
        (["--pace", "prefill=fast"], "--pace: "),
        (["--pace", "missing.json"], "--pace: missing.json: No such file"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(machine, options, message):
    result = machine.kllm("up", "-f", str(machine.manifest), *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert list(machine.runtime.iterdir()) == []


def test_down_stops_it(machine):
    with machine.up() as up:
        up.wait_for("serving")
        result = machine.kllm("down")
        assert result.returncode == 0
        assert result.stdout.startswith("service 'chat' has stopped (")
        assert up.end()[0] == 0


def test_down_stops_what_has_lost_its_state(machine):
    with machine.up() as up:
        up.wait_for("serving")
        (machine.runtime / "kllm" / "chat" / "state.json").unlink()
        result = machine.kllm("down")
        assert result.returncode == 0
        assert f"service 'chat' is up (pid {up.process.pid}), but " in result.stderr
        assert result.stdout.startswith("service 'chat' has stopped (")
        assert up.end()[0] == 0


def test_down_with_nothing_up_says_so(machine):
    result = machine.kllm("down")
    assert (result.returncode, result.stdout) == (0, "nothing is up on this machine\n")
    result = machine.kllm("down", "chat")
    assert (result.returncode, result.stdout) == (0, "service 'chat' is not up on this machine\n")


def test_down_kills_what_does_not_stop(machine):
    with machine.up() as up:
        up.wait_for("serving")
        up.signal(signal.SIGSTOP)
        result = machine.kllm("down", "--timeout", "0.2")
        assert result.returncode == 0
        assert "did not stop within 0.2 s and is killed" in result.stderr
        assert up.end()[0] == -signal.SIGKILL
    assert machine.left() == []


def test_after_a_kill_status_says_so_and_down_cleans_up(machine):
    with machine.up(FAKE_STRAY="1") as up:
        up.wait_for("serving")
        up.signal(signal.SIGKILL)
        up.end()
    result = machine.kllm("status")
    assert result.returncode == 2
    assert "was killed; clean up with: kllm down chat" in result.stderr
    assert machine.left() != []
    assert "2 processes were left and are ended" in machine.kllm("down").stdout
    assert machine.left() == []


def test_after_a_kill_it_can_be_started_again(machine):
    with machine.up(FAKE_STRAY="1") as up:
        up.wait_for("serving")
        up.signal(signal.SIGKILL)
        up.end()
    with machine.up() as up:
        up.wait_for("serving")
        assert len(machine.left()) == 5
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0


def test_down_with_two_services_asks_which(machine):
    other = machine.folder / "other.yaml"
    with machine.up() as one:
        one.wait_for("serving")
        other.write_text(machine.manifest.read_text().replace("name: chat", "name: other"))
        machine.manifest = other
        with machine.up() as two:
            two.wait_for("serving")
            result = machine.kllm("down")
            assert result.returncode == 2
            assert "chat, other" in result.stderr
            assert machine.kllm("down", "other").returncode == 0
            assert two.end()[0] == 0
        assert machine.kllm("down").returncode == 0
        assert one.end()[0] == 0


def test_on_a_terminal_lines_to_copy_are_not_wrapped_and_steps_end_with_a_tick(machine):
    """The live view is gone when the address is printed, and Ctrl-C typed there stops everything."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(machine.folder)
        arguments = [sys.executable, DRIVER, "up", "-f", str(machine.manifest), "--port", "0"]
        os.execve(sys.executable, arguments, {**machine.environment, "COLUMNS": "60", "TERM": "xterm"})
    shown = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    asked = False
    while time.monotonic() < deadline:
        readable, _, _ = select.select([terminal], [], [], 0.5)
        try:
            shown += os.read(terminal, 65536) if readable else b""
        except OSError:  # the other side is closed
            break
        if b"Ctrl-C stops it." in shown and not asked:
            os.write(terminal, b"\x03")
            asked = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = shown.decode()
    assert re.search(r"✓ chat-prefill-0: serving \(\d+\.\d s\)", text)
    assert re.search(r"  curl http://\S+/v1/chat/completions -H 'content-type: application/json' -d '{.*}'\r", text)
    assert "✓ stop: everything has stopped" in text
