"""A service's fleet token: made once, and read from then on."""

from __future__ import annotations

import base64
import secrets

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


async def read_token(api: KubeApi, service: InferenceService, *, uid: str) -> str | None:
    """The token; None if there is none yet.

    Args:
        api: where it is.
        service: whose it is.
        uid: of the service's object.

    Raises:
        NameTakenError: the secret of that name is another's.
        InvalidError: it holds no token.
    """
    empty = fleet_token(service, uid=uid, token="")["metadata"]
    try:
        found = await api.get(SECRETS, namespace=empty["namespace"], name=empty["name"])
    except NotFoundError:
        return None
    return _token_in(found, uid)


async def ensure_token(api: KubeApi, service: InferenceService, *, uid: str) -> str:
    """The token, which is made if there is none. See `read_token`."""
    found = await read_token(api, service, uid=uid)
    if found is not None:
        return found
    token = secrets.token_urlsafe(_BYTES)
    try:
        await api.create(fleet_token(service, uid=uid, token=token))
    except AlreadyExistsError:
        # Made in an attempt whose answer was lost.
        found = await read_token(api, service, uid=uid)
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
