"""Stands for kubectl: objects from a file beside it, each call written down, and errors as kubectl words them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent


def main() -> None:
    """Answer one call."""
    flags = [each for each in sys.argv[1:] if each.startswith("--") and each != "--raw"]
    words = [each for each in sys.argv[1:] if each not in flags]
    with (HERE / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    world = json.loads((HERE / "world.json").read_text())
    if (error := world.get("error")) is not None:
        fail(error)
    if words[:2] == ["get", "--raw"]:
        if words[2] not in world["raw"]:
            fail('Error from server (ServiceUnavailable): no endpoints available for service "chat"')
        say(world["raw"][words[2]])
    elif words[0] == "get" and len(words) == 3:
        say(find(world, words[1], words[2]))
    elif words[0] == "get":
        kinds = words[1].split(",")
        items = [each for kind in kinds for each in world.get(kind, []) if inside(each, flags) and chosen(each, flags)]
        say({"kind": "List", "items": items})
    elif words[0] == "annotate":
        annotate(world, find(world, words[1], words[2]), words[3])


def annotate(world: dict, document: dict, annotation: str) -> None:
    """Set or remove it; then what the world says happens to whoever is asked."""
    notes = document["metadata"].setdefault("annotations", {})
    key, _, value = annotation.partition("=")
    if annotation.endswith("-"):
        notes.pop(annotation[:-1], None)
    else:
        notes[key] = value
    (HERE / "world.json").write_text(json.dumps(world | world.get("then", {})))


def find(world: dict, kind: str, name: str) -> dict:
    """The object, or the end."""
    for document in world.get(kind, []):
        if document["metadata"]["name"] == name:
            return document
    return fail(f'Error from server (NotFound): {kind} "{name}" not found')


def inside(document: dict, flags: list[str]) -> bool:
    """Whether it is in the namespace that is meant."""
    wanted = next((each.partition("=")[2] for each in flags if each.startswith("--namespace=")), "default")
    return "--all-namespaces" in flags or document["metadata"].get("namespace", "default") == wanted


def chosen(document: dict, flags: list[str]) -> bool:
    """Whether its labels are selected."""
    selector = next((each.partition("=")[2] for each in flags if each.startswith("--selector=")), "")
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return wanted.items() <= document["metadata"].get("labels", {}).items()


def say(document: dict) -> None:
    """Answer."""
    sys.stdout.write(json.dumps(document))


def fail(text: str) -> NoReturn:
    """End as kubectl does."""
    sys.stderr.write(text + "\n")
    sys.exit(1)


main()
