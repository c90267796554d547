from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from router_brain.brain_helpers import wait_until

from kllm_core.objectives import Role
from kllm_router.discovery.file import FleetFileError, parse_fleet_file, watch_fleet_file
from kllm_router.discovery.instances import DiscoveredInstance


def content(*names: str) -> str:
    entries = [{"id": name, "role": "prefill", "agent": f"127.0.0.1:{n}"} for n, name in enumerate(names)]
    return json.dumps({"version": 1, "service": "chat", "instances": entries})


def replace(path: Path, text: str) -> None:
    part = path.with_suffix(".new")
    part.write_text(text)
    part.rename(path)


async def test_changes_are_told_and_broken_files_change_nothing(tmp_path: Path):
    path, seen = tmp_path / "fleet.json", []

    async def follow() -> None:
        async for instances in watch_fleet_file(path, poll_seconds=0.005):
            names = [instance.id for instance in instances]
            seen.append(names)

    task = asyncio.create_task(follow())
    replace(path, content("a"))
    await wait_until(lambda: seen == [["a"]])
    path.write_text(content("a", "b")[:40])
    await asyncio.sleep(0.03)
    path.unlink()
    await asyncio.sleep(0.03)
    replace(path, content("a"))
    await asyncio.sleep(0.03)
    assert seen == [["a"]]
    replace(path, content("b", "a"))
    await wait_until(lambda: seen == [["a"], ["b", "a"]])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_instance_is_read():
    assert parse_fleet_file(content("a").encode()) == [DiscoveredInstance("a", Role.PREFILL, "127.0.0.1:0")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "version"),
        ('{"version": 2}', "version"),
        ('{"version": 1, "instances": {}}', "instances"),
        ('{"version": 1, "instances": [1]}', r"instances\[0\]"),
        ('{"version": 1, "instances": [{"id": "a", "role": "x", "agent": "y"}]}', "role"),
        ('{"version": 1, "instances": [{"id": "a", "role": "decode"}]}', "agent"),
        (content("a", "a"), "twice"),
    ],
)
def test_a_wrong_file_is_refused_by_field(text: str, told: str):
    with pytest.raises(FleetFileError, match=told):
        parse_fleet_file(text.encode())
