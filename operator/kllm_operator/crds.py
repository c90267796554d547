"""`python -m kllm_operator.crds`: brings the kinds of a cluster up to date, and checks an installation.

The chart's jobs run it. Kinds are applied server-side: they are too large for the annotation of a client-side apply,
and helm itself never touches kinds that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml

from kllm_core import labels
from kllm_operator.kube.client import ApiServer
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.login import Login, LoginError
from kllm_operator.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, Document, Resource
from kllm_operator.render.objects import spec_hash

_MOST_BYTES = 4 << 20
_PAUSE_SECONDS = 0.5
_ASK_SECONDS = 5.0


class InstallationError(Exception):
    """The kinds cannot be read or are not served, or the operator is not ready; the message says which and why."""


class DefinitionApi(Protocol):
    """What is needed of the API server."""

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> Document:
        """See `KubeApi.get`."""

    async def apply(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.apply`."""


def read_definitions(folder: Path) -> list[Document]:
    """All CustomResourceDefinitions of a folder, each with the hash of its content as an annotation.

    Raises:
        InstallationError: there are none, or a file is something else.
    """
    documents = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise InstallationError(f"{path}: larger than {_MOST_BYTES} bytes")
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InstallationError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(document, dict) or document.get("kind") != CUSTOM_RESOURCE_DEFINITIONS.kind:
            raise InstallationError(f"{path}: is no {CUSTOM_RESOURCE_DEFINITIONS.kind}")
        annotations = {**document["metadata"].get("annotations", {}), labels.SPEC_HASH: spec_hash(document)}
        documents.append({**document, "metadata": {**document["metadata"], "annotations": annotations}})
    if not documents:
        raise InstallationError(f"{folder}: there is no CustomResourceDefinition in it")
    return documents


async def apply(api: DefinitionApi, definitions: Sequence[Document], *, seconds: float) -> None:
    """Have the API server serve these kinds, and wait until it does.

    Raises:
        InstallationError: it does not within that time.
        KubeError: it refuses one.
    """
    for definition in definitions:
        await api.apply(definition)
    await _until_served(api, definitions, seconds)


async def check(api: DefinitionApi, definitions: Sequence[Document], *, operator: str | None, seconds: float) -> None:
    """See whether the API server serves exactly these kinds, and whether the operator is ready.

    Args:
        api: of the cluster.
        definitions: as `read_definitions` gives them.
        operator: base URL of the operator; None does not ask it.
        seconds: to wait for either.

    Raises:
        InstallationError: one of them is not so within that time.
        KubeError: the API server does not answer.
    """
    await _until_served(api, definitions, seconds)
    if operator is not None:
        await _until_ready(f"{operator}/readyz", seconds)


async def _until_served(api: DefinitionApi, definitions: Sequence[Document], seconds: float) -> None:
    end = time.monotonic() + seconds
    for definition in definitions:
        while (trouble := await _trouble(api, definition)) is not None:
            if time.monotonic() >= end:
                raise InstallationError(trouble)
            await asyncio.sleep(_PAUSE_SECONDS)


async def _trouble(api: DefinitionApi, definition: Document) -> str | None:
    name = definition["metadata"]["name"]
    found = await api.get(CUSTOM_RESOURCE_DEFINITIONS, namespace=None, name=name)
    if _hash(found) != _hash(definition):
        return f"{name} is that of another version of kLLM"
    # Both are null as long as nobody has looked at a kind that is new.
    conditions = {each["type"]: each for each in (found.get("status") or {}).get("conditions") or ()}
    for kind in ("NamesAccepted", "Established"):
        condition = conditions.get(kind, {})
        if condition.get("status") != "True":
            return f"{name} is not {kind}: {condition.get('message') or 'the API server has not said why'}"
    return None


def _hash(definition: Document) -> str | None:
    hashed: str | None = definition["metadata"].get("annotations", {}).get(labels.SPEC_HASH)
    return hashed


async def _until_ready(url: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_SECONDS)) as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
                    trouble = f"HTTP {answer.status}: {(await answer.text())[:500]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            if time.monotonic() >= end:
                raise InstallationError(f"the operator is not ready: {url}: {trouble}")
            await asyncio.sleep(_PAUSE_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; gives the exit status: 0, or 1 with the reason on standard error."""
    given = _parser().parse_args(argv)
    try:
        asyncio.run(_run(given))
    except (InstallationError, KubeError, LoginError) as error:
        print(f"kllm_operator.crds: {error}", file=sys.stderr)  # noqa: T201 - a command line
        return 1
    return 0


async def _run(given: argparse.Namespace) -> None:
    definitions = read_definitions(given.folder)
    login = Login(given.kubeconfig)
    await login.load()
    async with ApiServer(login) as api:
        if given.command == "apply":
            await apply(api, definitions, seconds=given.seconds)
        else:
            await check(api, definitions, operator=given.operator, seconds=given.seconds)
    print(f"{len(definitions)} kinds are served")  # noqa: T201 - a command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kllm_operator.crds", allow_abbrev=False)
    parser.add_argument("--kubeconfig", help="file; default: KUBECONFIG, else the pod's service account")
    parser.add_argument("--seconds", type=float, default=60.0, help="to wait for the API server or the operator")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("apply", "bring the kinds up to date"), ("check", "check an installation")):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("folder", type=Path, help="folder of CustomResourceDefinitions")
    commands.choices["check"].add_argument("--operator", metavar="URL", help="ask the operator's /readyz as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
