"""Where the API server is and who the operator is there: a kubeconfig file, or the pod's service account."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

_DEFAULT_FILE = "~/.kube/config"


class LoginError(Exception):
    """There is no usable way to the API server; the message says what was tried."""


@dataclass(frozen=True)
class Credentials:
    """For another client of the same server; files are paths.

    Attributes:
        scheme: of the authorization header, with its token; both None with a client certificate.
    """

    server: str
    insecure: bool
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    scheme: str | None
    token: str | None


class Login:
    """The way to one API server. Tokens are read again when they change or were refused.

    Args:
        kubeconfig: a file, or several separated by colons; None: that of KUBECONFIG, else the pod's service account,
            else the user's own file.
        context: of that file; None is its current one.
    """

    def __init__(self, kubeconfig: str | None = None, *, context: str | None = None) -> None:
        self.configuration = Configuration()
        given = kubeconfig or os.environ.get("KUBECONFIG") or None
        self._in_cluster = given is None and "KUBERNETES_SERVICE_HOST" in os.environ
        self._file = given or str(Path(_DEFAULT_FILE).expanduser())
        self._context = context

    async def load(self) -> None:
        """Read address, certificates and token, or read them again.

        Raises:
            LoginError: they are not there or not usable.
        """
        try:
            if self._in_cluster:
                load_incluster_config(client_configuration=self.configuration)  # type: ignore[no-untyped-call]
            else:
                await load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=self._file,
                    context=self._context,
                    client_configuration=self.configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError) as error:
            source = "the pod's service account" if self._in_cluster else self._file
            raise LoginError(f"no way to the API server by {source}: {error}") from error
        # The environment is read here, and not again at each request.
        self.configuration.client_session_kwargs = {"trust_env": False}
        self.configuration.proxy = self.configuration.proxy or _proxy_of(str(self.configuration.host))

    async def credentials(self) -> Credentials:
        """What was read, for another client."""
        settings = self.configuration
        header = await self.authorization()
        scheme, _, token = (header or "").rpartition(" ")
        return Credentials(
            server=str(settings.host),
            insecure=not settings.verify_ssl,
            ca_path=settings.ssl_ca_cert,
            certificate_path=settings.cert_file,
            private_key_path=settings.key_file,
            scheme=scheme.strip() or None,
            token=token or None,
        )

    async def authorization(self) -> str | None:
        """The authorization header; None with a client certificate. A token file that is a minute old is read again.

        Raises:
            LoginError: it is empty; whoever writes it is not done.
            OSError: it cannot be read.
        """
        try:
            header = await self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        except ConfigException as error:
            raise LoginError(f"no token for the API server: {error}") from error
        return str(header) if header else None


def _proxy_of(server: str) -> str | None:
    """The proxy that the environment names for an address; None to go there directly."""
    parts = urlsplit(server)
    if proxy_bypass(parts.netloc):
        return None
    return getproxies().get(parts.scheme)
