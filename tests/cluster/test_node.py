from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.orders import NodeOrders

# The node's first process without its namespaces, which take root.
RUN = """
import asyncio, sys
from pathlib import Path
from e2e.cluster import node
from e2e.cluster.layout import Layout
home = Path(sys.argv[1])
async def main():
    task = asyncio.create_task(node.run(Layout(home=home, cache=home)))
    while not (home / "node.sock").exists():
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await task
asyncio.run(main())
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "log").mkdir()
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


@pytest.fixture
def node(process: subprocess.Popen[str], tmp_path: Path) -> NodeOrders:
    return NodeOrders(Layout(home=tmp_path, cache=tmp_path).control)


def test_a_component_runs_until_it_is_stopped(node: NodeOrders) -> None:
    node.start("sleeper", ["sleep", "60"])
    assert node.state()["sleeper"].code is None
    node.stop("sleeper")
    assert node.state()["sleeper"].code == -15


def test_a_killed_component_has_no_time_to_end(node: NodeOrders) -> None:
    node.start("deaf", ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    node.stop("deaf", kill=True)
    assert node.state()["deaf"].code == -9


def test_a_component_that_runs_is_not_started_twice(node: NodeOrders) -> None:
    node.start("sleeper", ["sleep", "60"])
    first = node.state()["sleeper"].pid
    node.start("sleeper", ["sleep", "60"])
    assert node.state()["sleeper"].pid == first
    node.stop("sleeper")
    node.start("sleeper", ["sleep", "60"])
    assert node.state()["sleeper"].pid != first
    node.stop("sleeper")


def test_what_a_component_said_and_how_it_ended_is_kept(node: NodeOrders, tmp_path: Path) -> None:
    node.start("talker", ["sh", "-c", "echo out; echo err >&2; exit 3"])
    deadline = time.monotonic() + 10
    while node.state()["talker"].code is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert node.state()["talker"].code == 3
    assert (tmp_path / "log" / "talker.log").read_text() == "out\nerr\n"


def test_an_order_that_cannot_be_carried_out_says_why(node: NodeOrders) -> None:
    with pytest.raises(ClusterError, match=r"missing cannot be started: .*No such file"):
        node.start("missing", ["/no/such/program"])
    with pytest.raises(ClusterError, match="other was not started"):
        node.stop("other")


def test_a_node_is_found_by_its_socket_and_ended(node: NodeOrders, process: subprocess.Popen[str]) -> None:
    assert node.pid() == process.pid
    node.end()
    assert process.wait(timeout=5) == -9
    assert node.pid() is None
    with pytest.raises(ClusterError, match="make cluster"):
        node.state()
