"""A service's fleet token: made once, and read from then on."""

from __future__ import annotations

import base64
import secrets
from typing import Protocol

from kllm_core.kinds.service import InferenceService
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.exceptions import AlreadyExistsError, InvalidError, NotFoundError
from kllm_operator.kube.ownership import is_controlled_by
from kllm_operator.kube.resources import SECRETS, Document
from kllm_operator.render.service import fleet_token
from kllm_operator.service.children import NameTakenError

_KEY = "token"
_BYTES = 32
_LEAST_CHARACTERS = 16


class RenderToken(Protocol):
    """Renders the secret that holds a token."""

    def __call__(self, service: InferenceService, *, uid: str, token: str) -> Document:
        """See `kllm_operator.render.service.fleet_token`."""


async def read_token(
    api: KubeApi, service: InferenceService, *, uid: str, render: RenderToken = fleet_token
) -> str | None:
    """The token; None if there is none yet.

    Args:
        api: where it is.
        service: whose it is.
        uid: of the object that owns it.
        render: the secret that holds it.

    Raises:
        NameTakenError: the secret of that name is another's.
        InvalidError: it holds no token.
    """
    empty = render(service, uid=uid, token="")["metadata"]
    try:
        found = await api.get(SECRETS, namespace=empty["namespace"], name=empty["name"])
    except NotFoundError:
        return None
    return _token_in(found, uid)


async def ensure_token(
    api: KubeApi, service: InferenceService, *, uid: str, render: RenderToken = fleet_token, new: bool = False
) -> str:
    """The token, which is made if there is none. See `read_token`.

    Args:
        api: where it is.
        service: whose it is.
        uid: of the object that owns it.
        render: the secret that holds it.
        new: there will be none, so that it is not looked for first.
    """
    found = None if new else await read_token(api, service, uid=uid, render=render)
    if found is not None:
        return found
    token = secrets.token_urlsafe(_BYTES)
    try:
        await api.create(render(service, uid=uid, token=token))
    except AlreadyExistsError:
        # Made in an attempt whose answer was lost, or not new after all.
        found = await read_token(api, service, uid=uid, render=render)
        if found is None:
            raise
        return found
    return token


def _token_in(secret: Document, uid: str) -> str:
    metadata = secret["metadata"]
    where = f"Secret {metadata['namespace']}/{metadata['name']}"
    if not is_controlled_by(secret, uid):
        raise NameTakenError(f"{where} is there and is not this service's: delete it, or give the service another name")
    try:
        token = base64.b64decode((secret.get("data") or {})[_KEY], validate=True).decode().strip()
    except (KeyError, ValueError):
        token = ""
    if len(token) < _LEAST_CHARACTERS:
        raise InvalidError(f"{where} holds no token: delete it and the service's pods; a new one is made then")
    return token
