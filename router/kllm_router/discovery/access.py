"""How to reach the API server, and as whom: from a pod, or from a kubeconfig file."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kllm_router.discovery.exceptions import AccessError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """The way to the API server. Files are read at each use, since the kubelet replaces them.

    Attributes:
        server: its base URL.
        namespace: the one that is meant when none is named.
        authority: certificates that its own must come from: a file, or PEM text; None trusts the system's.
        verify: False takes any certificate.
        token: a file, or the token; None without.
        client_certificate: certificate and key, each a file or PEM text; None without.
    """

    server: str
    namespace: str
    authority: Path | str | None = None
    verify: bool = True
    token: Path | str | None = None
    client_certificate: tuple[Path | str, Path | str] | None = None

    def check(self) -> None:
        """See that everything that it names can be used.

        Raises:
            AccessError: something cannot.
        """
        self.headers()
        self.tls()

    def headers(self) -> dict[str, str]:
        """Headers that say who asks.

        Raises:
            AccessError: the token cannot be read.
        """
        if self.token is None:
            return {}
        token = _text(self.token).strip()
        if not token.isascii() or not token.isprintable() or not token:
            raise AccessError(f"{_named(self.token)}: this is no token")
        return {"authorization": f"Bearer {token}"}

    def tls(self) -> ssl.SSLContext:
        """Settings of the connection.

        Raises:
            AccessError: a certificate cannot be read.
        """
        try:
            context = ssl.create_default_context(
                cafile=str(self.authority) if isinstance(self.authority, Path) else None,
                cadata=self.authority if isinstance(self.authority, str) else None,
            )
        except (OSError, ValueError) as error:  # a certificate in text must be ASCII
            raise AccessError(f"{_named(self.authority)}: certificates cannot be read: {error}") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate is not None:
            _load_client_certificate(context, *self.client_certificate)
        return context


def in_cluster(*, folder: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ) -> Access:
    """The way from a pod, as its ServiceAccount.

    Raises:
        AccessError: this is no pod, or one without a ServiceAccount token.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessError("KUBERNETES_SERVICE_HOST is not set, so this is no pod; outside a cluster give --kubeconfig")
    if not (folder / "token").is_file():
        raise AccessError(f"{folder}/token is not there; mount the ServiceAccount's token into the pod")
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=_text(folder / "namespace").strip() if (folder / "namespace").is_file() else "default",
        authority=folder / "ca.crt",
        token=folder / "token",
    )


def from_kubeconfig(path: Path) -> Access:
    """The way that the file's current context names.

    Raises:
        AccessError: the file cannot be used; the message names the field.
    """
    try:
        document = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise AccessError(f"{path}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise AccessError(f"{path}: not a kubeconfig file")
    context = _entry(path, document, "context", document.get("current-context"))
    cluster = _entry(path, document, "cluster", context.get("cluster"))
    user = _entry(path, document, "user", context.get("user")) if context.get("user") else {}
    if not isinstance(cluster.get("server"), str):
        raise AccessError(f"{path}: cluster {context.get('cluster')!r} has no server")
    unusable = sorted({"exec", "auth-provider", "username"} & user.keys())
    if unusable:
        raise AccessError(
            f"{path}: user {context.get('user')!r} logs in by {unusable[0]!r}; give one with a token or a certificate"
        )
    certificate, key = _given(path, user, "client-certificate"), _given(path, user, "client-key")
    if (certificate is None) != (key is None):
        raise AccessError(f"{path}: user {context.get('user')!r} needs client-certificate and client-key together")
    token, token_file = _field(path, user, "token"), _field(path, user, "tokenFile")
    return Access(
        server=cluster["server"].rstrip("/"),
        namespace=str(context.get("namespace") or "default"),
        authority=_given(path, cluster, "certificate-authority"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        token=path.parent / token_file if token_file else token,
        client_certificate=None if certificate is None or key is None else (certificate, key),
    )


def _entry(path: Path, document: dict[str, Any], kind: str, name: object) -> dict[str, Any]:
    """The body of the context, cluster or user of that name."""
    if not name:
        raise AccessError(f"{path}: {'current-context' if kind == 'context' else kind} is not set")
    entries = document.get(f"{kind}s")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            return dict(entry[kind])
    raise AccessError(f"{path}: there is no {kind} {name!r}")


def _field(path: Path, entry: dict[str, Any], field: str) -> str | None:
    """A field that is text; None when it is not there."""
    value = entry.get(field)
    if value is None or isinstance(value, str):
        return value or None
    raise AccessError(f"{path}: {field} must be text; put it in quotes")


def _given(path: Path, entry: dict[str, Any], field: str) -> Path | str | None:
    """A field that is a file, beside the kubeconfig when relative, or text under its -data name."""
    data, file = _field(path, entry, f"{field}-data"), _field(path, entry, field)
    if data:
        try:
            return base64.b64decode(data, validate=True).decode()
        except ValueError as error:
            raise AccessError(f"{path}: {field}-data is not base64 text: {error}") from error
    return path.parent / file if file else None


def _load_client_certificate(context: ssl.SSLContext, certificate: Path | str, key: Path | str) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="kllm-") as folder:  # the library loads files only
            files = Path(folder) / "certificate", Path(folder) / "key"
            for file, given in zip(files, (certificate, key), strict=True):
                file.write_text(_text(given))
            context.load_cert_chain(*map(str, files))
    except (OSError, ssl.SSLError) as error:
        raise AccessError(f"{_named(certificate)}: the client certificate cannot be used: {error}") from error


def _text(given: Path | str) -> str:
    if isinstance(given, str):
        return given
    try:
        return given.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{given} cannot be read: {error}") from error


def _named(given: Path | str | None) -> str:
    """Where something came from, without showing it."""
    return str(given) if isinstance(given, Path) else "kubeconfig"
