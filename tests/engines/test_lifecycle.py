"""`kllm up` ends in order, and whatever is killed, nothing is left running and the message says what happened."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path

import httpx2
import pytest
from conftest import TINY
from service_under_test import (
    Service,
    alive,
    descendants,
    environment_in,
    free_port,
    manifest,
    start,
    up,
    wait_event,
    wait_until,
)

pytestmark = pytest.mark.engines


def document(name: str = "small"):
    return manifest(name=name, uri=TINY, replicas=1)


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def victims(service: Service) -> dict[str, int]:
    """One process of each kind."""
    pids = service.pids()
    servers = descendants(pids["zygote"])
    agent = next(pid for name, pid in sorted(pids.items()) if name.startswith("small-decode-"))
    found = {"agent": agent, "zygote": pids["zygote"], "router": pids["router-0"]}
    for pid in servers:
        title = cmdline(pid)
        if "scheduler" in title:
            found["scheduler"] = pid
        elif "detokenizer" in title:
            found["detokenizer"] = pid
        else:
            found["server"] = pid
    return found


@pytest.mark.parametrize("kind", ["zygote", "router"])
def test_killing_what_nothing_goes_on_without_ends_the_run_with_a_message_and_no_orphan(kind):
    with up(document()) as service:
        everything = descendants(service.process.pid)

        os.kill(victims(service)[kind], signal.SIGKILL)

        wait_until(lambda: service.process.poll() is not None, seconds=30, what="the end of `kllm up`")
        wait_until(lambda: not alive(everything), seconds=5, what=lambda: f"no orphan, alive: {alive(everything)}")
        assert service.process.returncode == 1
        message = (Path(service.environment["XDG_RUNTIME_DIR"]) / "up.err").read_text()
        assert "small-" in message or kind in message
        assert "kllm:" in message


def test_killing_any_process_of_an_instance_replaces_it_and_leaves_no_orphan():
    with up(document()) as service:
        for kind in ("agent", "server", "scheduler", "detokenizer"):
            kill_and_see_another(service, kind)
        assert service.process.poll() is None


def kill_and_see_another(service: Service, kind: str) -> None:
    """Kill one process of an instance; another instance serves, and an answer comes."""
    before = {each["id"] for each in service.instances()}
    killed = victims(service)[kind]
    parts = descendants(killed) | {killed}

    os.kill(killed, signal.SIGKILL)

    wait_until(lambda: is_replaced(service, before), seconds=60, what=f"another instance after the {kind}")
    wait_until(lambda: not alive(parts), seconds=5, what=lambda: f"no orphan, alive: {alive(parts)}")
    body = {"model": "test-model", "prompt": "hello", "max_tokens": 4}
    answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=30)
    assert answer.is_success, answer.text


def is_replaced(service: Service, before: set[str]) -> bool:
    """Whether exactly one instance is new, and both serve."""
    now = {each["id"] for each in service.instances() if each["state"] == "Serving"}
    return len(now) == len(before) and len(now - before) == 1


def test_killing_kllm_up_leaves_nothing_and_the_next_up_works():
    with up(document()) as service:
        everything = descendants(service.process.pid)
        service.process.kill()
        service.process.wait(10)
        wait_until(lambda: not alive(everything), seconds=5, what=lambda: f"no orphan, alive: {alive(everything)}")

        # The killed run left its state behind; the next one must clean it up and serve.
        folder = Path(service.environment["XDG_RUNTIME_DIR"])
        again = start(document(), folder, "--port", str(free_port()))
        try:
            served = wait_event(again, "serving")
            assert httpx2.get(f"{served['url']}/v1/models").json()["data"][0]["id"] == "test-model"
        finally:
            again.send_signal(signal.SIGINT)
            again.communicate(timeout=30)
        assert again.returncode == 0


@pytest.mark.parametrize("phase", ["model", "small-prefill-0", "router", "serving"])
def test_ctrl_c_in_each_phase_leaves_nothing(phase):
    with tempfile.TemporaryDirectory(prefix="kllm-test-") as name:
        process = start(document(), Path(name), "--port", str(free_port()))
        if phase == "serving":
            wait_event(process, "serving")
        else:
            while wait_event(process, "step")["name"] != phase:
                pass
        everything = descendants(process.pid)

        process.send_signal(signal.SIGINT)

        process.communicate(timeout=20)
        assert process.returncode in {0, 130}
        assert not alive(everything)
        assert not list((Path(name) / "kllm").glob("*/state.json"))


def test_up_twice_is_refused_and_the_first_goes_on(service: Service):
    folder = Path(service.environment["XDG_RUNTIME_DIR"])

    second = start(document("shared"), folder, "--port", str(free_port()))
    second.communicate(timeout=60)

    assert second.returncode == 2
    assert "already" in (folder / "up.err").read_text()
    assert httpx2.get(f"{service.url}/readyz").status_code == 200


def test_a_port_in_use_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory(prefix="kllm-test-") as name:
        port = taken.getsockname()[1]

        process = start(document(), Path(name), "--port", str(port))
        process.communicate(timeout=60)

        assert process.returncode == 2
        message = (Path(name) / "up.err").read_text()
        assert str(port) in message
        assert "--port" in message


def test_a_kv_pool_that_cannot_hold_one_request_is_refused():
    small = {"engineArgs": {"max-total-tokens": 1024, "context-length": 4096}}
    with tempfile.TemporaryDirectory(prefix="kllm-test-") as name:
        wrong = document()
        wrong["spec"]["decode"] |= small

        process = start(wrong, Path(name), "--port", str(free_port()))
        process.communicate(timeout=120)

        assert process.returncode == 1
        message = (Path(name) / "up.err").read_text()
        assert "max-total-tokens" in message
        assert "context-length" in message


def test_a_wrong_manifest_starts_nothing(tmp_path: Path):
    path = tmp_path / "wrong.yaml"
    path.write_text("apiVersion: kllm.io/v1alpha1\nkind: InferenceService\nmetadata: {name: x}\nspec: {modell: {}}\n")
    service = Service(None, "", "", tmp_path, environment_in(tmp_path))  # type: ignore[arg-type]

    done = service.command("up", "-f", str(path))

    assert done.returncode == 2
    assert "spec.modell: unknown field; did you mean 'model'?" in done.stderr
    assert not (tmp_path / "kllm").exists()


def test_status_chat_and_down_work_on_what_is_up():
    with up(document()) as service:
        status = service.command("status")
        assert status.returncode == 0
        for expected in ("small-prefill-0", "small-decode-0", service.url):
            assert expected in status.stdout
        chat = service.command("chat", "Hello", "--max-tokens", "8")
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout.strip()
        everything = descendants(service.process.pid)

        down = service.command("down")

        assert down.returncode == 0, down.stderr
        assert service.process.wait(10) == 0
        assert not alive(everything)
        assert service.command("status").returncode != 0
        assert service.command("chat", "Hello").returncode == 2
