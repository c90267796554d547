"""The cluster's command line.

python -m e2e.cluster up | down | state | build [PROGRAM...] | load FILE | offer [RESOURCE [COUNT]]
python -m e2e.cluster start NAME | stop NAME [--kill] | restart NAME [--kill]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from e2e.cluster import binaries, components
from e2e.cluster.cluster import Cluster
from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.talk import say


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A real single-node Kubernetes cluster.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("up", help="bring it up")
    actions.add_parser("down", help="take it down and leave nothing but the built programs")
    actions.add_parser("state", help="show its components")
    build = actions.add_parser("build", help="build its programs")
    build.add_argument("names", nargs="*", metavar="PROGRAM")
    for action in ("start", "stop", "restart"):
        changed = actions.add_parser(action, help=f"{action} one component")
        changed.add_argument("name", help="as `state` calls it, or " + ", ".join(components.SHORT_NAMES))
        if action != "start":
            changed.add_argument("--kill", action="store_true", help="give it no time to end by itself")
    offer = actions.add_parser("offer", help="let the node say that it has so many accelerators")
    offer.add_argument("resource", nargs="?", default="nvidia.com/gpu")
    offer.add_argument("count", nargs="?", type=int, default=16)
    load = actions.add_parser("load", help="import an image file")
    load.add_argument("file", type=Path)
    return parser.parse_args()


def run(cluster: Cluster, given: argparse.Namespace) -> None:
    """Do what the arguments ask for."""
    match given.action:
        case "up":
            cluster.up()
        case "down":
            cluster.down()
        case "build":
            sys.stdout.write(f"{binaries.ensure(cluster.layout, only=given.names)}\n")
        case "load":
            cluster.load(given.file)
        case "offer":
            cluster.offer(given.resource, given.count)
        case "state":
            for name, child in cluster.node.state().items():
                state = "running" if child.code is None else f"ended with {child.code}"
                sys.stdout.write(f"{name:24} {state}\n")
        case _:
            name = components.SHORT_NAMES.get(given.name, given.name)
            if given.action != "start":
                cluster.stop(name, kill=given.kill)
            if given.action != "stop":
                cluster.start(name)


def main() -> int:
    """Run the command line; 1 if it failed."""
    try:
        run(Cluster(Layout.of_environment()), parse())
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
