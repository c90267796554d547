"""Who owns a run directory, and what is cleaned when its owner was killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from substrate.substrate_helpers import wait_until

from kllm_operator.substrate.exceptions import AlreadyRunningError, RunDirectoryError
from kllm_operator.substrate.identity import RUN_VARIABLE, identify, kill_all, members
from kllm_operator.substrate.rundir import ProcessRecord, RunDirectory, RunState, service_names, tail, write_atomically

SLEEP = (sys.executable, "-c", "import signal; signal.pause()")


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def claimed(name: str = "chat") -> RunDirectory:
    run = RunDirectory(name)
    run.claim()
    return run


def test_directory_and_token_are_private():
    run = claimed()
    run.begin(model="m", now=0.0)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.token_file.stat().st_mode) == 0o600
    run.release()


def test_without_a_runtime_directory_it_is_in_the_temporary_folder_of_this_user(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert RunDirectory("chat").path.parent.name == f"kllm-{os.geteuid()}"


def test_a_second_owner_is_refused_and_told_who_the_first_is():
    run = claimed()
    run.begin(model="m", now=0.0)
    run.update(url="http://127.0.0.1:8000")
    with pytest.raises(AlreadyRunningError, match=r"already up at http://127\.0\.0\.1:8000") as refusal:
        RunDirectory("chat").claim()
    assert refusal.value.pid == os.getpid()
    run.release()
    claimed().release()


def test_two_services_have_two_directories():
    one, two = claimed("one"), claimed("two")
    assert service_names() == ["one", "two"]
    one.release()
    two.release()


def test_a_directory_open_to_others_is_refused(runtime):
    (runtime / "kllm").mkdir(mode=0o755)
    (runtime / "kllm").chmod(0o755)
    with pytest.raises(RunDirectoryError, match="chmod 700"):
        RunDirectory("chat").claim()


def test_a_link_in_place_of_the_directory_is_refused(runtime):
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "kllm").symlink_to(runtime / "elsewhere")
    with pytest.raises(RunDirectoryError, match="not a directory"):
        RunDirectory("chat").claim()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_someone_else_is_refused(runtime):
    (runtime / "kllm").mkdir(mode=0o700)
    os.chown(runtime / "kllm", 12345, 12345)
    with pytest.raises(RunDirectoryError, match="belongs to user 12345"):
        RunDirectory("chat").claim()


def test_a_socket_path_that_the_kernel_would_cut_is_refused_before_anything_is_made(runtime, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / ("x" * 100)))
    with pytest.raises(
        RunDirectoryError, match=r"107: give the service a shorter metadata\.name, or set XDG_RUNTIME_DIR"
    ):
        RunDirectory("chat").claim()


def test_state_survives_a_round_trip_and_garbage_is_no_state():
    state = RunState("chat", "id", 1, 2, 3.0, "m", processes=(ProcessRecord("zygote", "zygote", 4, 5, "log"),))
    assert RunState.from_json(state.to_json()) == state
    for text in ("", "[]", "{}", '{"version": 1}', '{"version": 99, "processes": []}', "null"):
        with pytest.raises(ValueError, match=r".*"):
            RunState.from_json(text)


def kill_owner_with_child(tmp_path: Path, *, own_session: bool, marked: bool) -> int:
    """An owner that starts a child which does not die with it, and is killed."""
    code = (
        "import os, subprocess, sys, time\n"
        "from kllm_operator.substrate.identity import RUN_VARIABLE, identify\n"
        "from kllm_operator.substrate.rundir import ProcessRecord, RunDirectory\n"
        "run = RunDirectory('chat'); run.claim(); state = run.begin(model='m', now=0.0)\n"
        f"environment = {{**os.environ, RUN_VARIABLE: state.run_id}} if {marked} else dict(os.environ)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],\n"
        f"    env=environment, start_new_session={own_session})\n"
        "identity = identify(child.pid)\n"
        f"if not {marked}:\n"
        "    run.update(processes=(ProcessRecord('a', 'prefill', child.pid, identity.started, ''),))\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
    return child


@pytest.mark.parametrize(("own_session", "marked"), [(True, True), (True, False), (False, True)])
def test_a_new_owner_ends_what_a_killed_one_left(tmp_path, own_session, marked):
    child = kill_owner_with_child(tmp_path, own_session=own_session, marked=marked)
    assert identify(child) is not None
    assert not RunDirectory("chat").is_owned
    run = claimed()
    assert identify(child) is None
    assert run.read_state() is None
    run.release()


def test_a_reused_process_number_is_left_alone():
    with subprocess.Popen(SLEEP, start_new_session=True) as stranger:
        run = claimed()
        state = run.begin(model="m", now=0.0)
        identity = identify(stranger.pid)
        assert identity is not None
        run.update(processes=(ProcessRecord("a", "prefill", stranger.pid, identity.started - 1, ""),))
        assert members(state.run_id, [record.identity for record in run.read_state().processes]) == []
        run.clean()
        run.release()
        assert stranger.poll() is None
        stranger.kill()


def test_descendants_are_members_even_without_mark_and_session():
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'], env={}, start_new_session=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, RUN_VARIABLE: "some-run"}) as parent:
        wait_until(lambda: len(members("some-run", [])) == 2, what="the grandchild is a member")
        assert kill_all(members("some-run", [])) == []
    assert parent.returncode < 0


def test_clean_keeps_logs_and_removes_the_rest():
    run = claimed()
    run.begin(model="m", now=0.0)
    run.log_file("zygote").write_text("line\n")
    run.zygote_socket.touch()
    run.clean()
    assert sorted(entry.name for entry in run.path.iterdir()) == ["lock", "logs"]
    assert tail(run.log_file("zygote")) == ("line",)
    run.release()


def test_tail_is_bounded_and_silent_about_missing_files(tmp_path):
    path = tmp_path / "log"
    assert tail(path) == ()
    path.write_text("".join(f"{number}\n" for number in range(100_000)))
    assert tail(path, 2) == ("99998", "99999")


def test_a_failed_write_leaves_the_old_text_and_no_other_file(tmp_path):
    path = tmp_path / "fleet.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
