"""Sets right what a watch did not tell: objects that went while it was broken for too long.

A watch that starts anew lists what there is, and says nothing of what has gone meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import Key, ObjectCache, key_of, version_of
from kllm_operator.kube.exceptions import NotFoundError
from kllm_operator.kube.resources import Document

_log = structlog.get_logger(__name__)


async def sweep(api: KubeApi, cache: ObjectCache, *, labels: str, namespaces: Collection[str | None]) -> list[Document]:
    """Compare a cache with the server and correct it; returns the objects about which it was wrong.

    Only what is wrong is read in full.

    Args:
        api: where the truth is.
        cache: what is corrected.
        labels: selector of what it holds.
        namespaces: where; None among them is all.
    """
    # What is known before the list is made, and is not in it, has gone.
    known = list(cache.all())
    listed: dict[Key, Document] = {}
    for namespace in namespaces:
        for each in await api.list(cache.resource, namespace=namespace, labels=labels, metadata_only=True):
            listed[key_of(each)] = each
    wrong = [each for each in known if _is_gone(each, listed) and cache.remove(each)]
    for key, document in listed.items():
        held = cache.get(*key)
        if held is None or version_of(held) < version_of(document):
            wrong += await _read(api, cache, key)
    if wrong:
        _log.warning("CacheCorrected", resource=cache.resource.qualified, objects=len(wrong))
    return wrong


def _is_gone(document: Document, listed: Mapping[Key, Document]) -> bool:
    there = listed.get(key_of(document))
    return there is None or there["metadata"]["uid"] != document["metadata"]["uid"]


async def _read(api: KubeApi, cache: ObjectCache, key: Key) -> list[Document]:
    try:
        document = await api.get(cache.resource, namespace=key[0], name=key[1])
    except NotFoundError:
        return []
    return [document] if cache.put(document) else []
