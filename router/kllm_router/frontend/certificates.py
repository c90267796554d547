"""The server's certificate: read from files, and again when they change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from kllm_router.frontend.files import changes

_RELOAD_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class CertificateError(ValueError):
    """A certificate that cannot be used; the message names its files."""


def server_context(chain: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and later, for HTTP/1.1.

    Raises:
        CertificateError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, chain, key)
    return context


async def follow_certificate(
    context: ssl.SSLContext,
    chain: Path,
    key: Path,
    *,
    on_reload: Callable[[bool], None],
    seconds: float = _RELOAD_SECONDS,
) -> None:
    """Use the files' certificate for new connections whenever it changes, until cancelled.

    Args:
        context: of the server.
        chain: certificates.
        key: private key.
        on_reload: told of every change, and whether it could be used.
        seconds: between two looks at the files.
    """
    for look, changed in enumerate(changes(chain, key)):
        if changed:
            try:
                # Half of a pair that is being replaced must not reach the context in use.
                await asyncio.to_thread(server_context, chain, key)
                _load(context, chain, key)
            except CertificateError as error:
                _log.error("the certificate stays as it was", reason=str(error))
                on_reload(False)
            else:
                if look:
                    _log.info("the certificate was read anew", path=str(chain))
                    on_reload(True)
        await asyncio.sleep(seconds)


def _load(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    try:
        # Without a passphrase at hand, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(chain, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"{chain} and {key} cannot be used: {error}") from error
