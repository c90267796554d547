"""Histories that the operator writes: bounded, whole at any time, and what `kllm replay` reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
from service.known import BOTH, report
from service.service_world import World, ready, service

from kllm.history.file import read_history
from kllm.history.replay import replayed
from kllm_core.fleet import Fleet
from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Role
from kllm_operator.fleet.levels import LevelReport
from kllm_operator.history.folder import HistoryFolder
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.service.scaled import scaled_of

MIB = 1 << 20


class Clock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def folder(path, *, most=MIB, file=MIB):
    return HistoryFolder(path / "history", most_bytes=most, file_bytes=file, wall=Clock())


def tick(at):
    told = report(BOTH)
    snapshot = SimpleNamespace(observed=tuple(BOTH), fleet=Fleet(at, {}))
    return told.__class__(**{**told.__dict__, "snapshot": snapshot})


def files(path):
    return sorted((path / "history").glob("*"))


def test_what_is_written_is_what_replay_reads(tmp_path):
    history = folder(tmp_path).service("team", "chat")
    for at in (1.0, 6.0, 11.0):
        history.hear(LevelReport("r", at, 1.0, 3))
        history.publish(tick(at), complete=True)

    (file,) = files(tmp_path)
    read = read_history(file)
    assert read.header.service == "team/chat"
    assert [(each.at, len(each.levels), len(each.observed)) for each in read.moments] == [
        (1.0, 1, 2), (6.0, 1, 2), (11.0, 1, 2),
    ]  # fmt: skip


def test_a_full_file_is_followed_by_another_that_is_a_history_by_itself(tmp_path):
    history = folder(tmp_path, file=2000).service("team", "chat")
    for number in range(20):
        history.publish(tick(float(number)), complete=True)

    found = files(tmp_path)
    assert len(found) > 2
    assert all(file.stat().st_size <= 2000 for file in found)
    moments = [each.at for file in found for each in read_history(file).moments]
    assert moments == [float(number) for number in range(20)]


def test_all_files_together_stay_within_their_bound_and_the_oldest_go(tmp_path):
    kept = folder(tmp_path, most=8000, file=2000)
    first, second = kept.service("team", "chat"), kept.service("team", "other")
    for number in range(100):
        for history in (first, second):
            history.publish(tick(float(number)), complete=True)
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 8000

    for name in ("chat", "other"):
        last = [file for file in files(tmp_path) if f".{name}." in file.name][-1]
        assert read_history(last).moments[-1].at == 99.0


def test_a_folder_that_cannot_be_written_is_said_once_and_the_loop_goes_on(tmp_path):
    (tmp_path / "history").write_text("in the way")
    history = folder(tmp_path).service("team", "chat")
    with structlog.testing.capture_logs() as logs:
        for number in range(5):
            history.publish(tick(float(number)), complete=True)
    assert [each["event"] for each in logs] == ["HistoryNotWritten"]

    (tmp_path / "history").unlink()
    history.publish(tick(9.0), complete=True)
    assert read_history(files(tmp_path)[0]).moments[0].at == 9.0


@pytest.mark.parametrize("name", ["chat", "a" * 63])
def test_a_new_leader_begins_a_file_of_its_own(tmp_path, name):
    kept = folder(tmp_path)
    for _ in range(2):
        history = kept.service("team", name)
        history.publish(tick(1.0), complete=True)
        history.close()
    assert len(files(tmp_path)) == 2


async def test_the_operator_writes_what_a_replay_decides_upon(tmp_path):
    world = World(folder(tmp_path))
    async with world.running():
        await ready(world)

    (file,) = files(tmp_path)
    history = read_history(file)
    assert history.header.service == "default/chat"
    scaled = scaled_of(check_service(service()))
    last = list(replayed(history.moments, scaled, LoopSettings()))[-1]
    assert (last.recorded.prefill, last.recorded.decode) == (1, 1)
    assert last.serving == {Role.PREFILL: 1, Role.DECODE: 1}
