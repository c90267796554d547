"""etcd and kube-apiserver by themselves: objects without anyone who acts on them. Needs a network of its own."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import binaries
from e2e.cluster.layout import Layout

ADDRESS = "10.245.0.2"
"""On the loopback link of the namespace."""
_SERVER = f"https://{ADDRESS}:6443"
_DATABASE = "http://127.0.0.1:2379"
_READY_SECONDS = 60.0
_END_SECONDS = 20.0

OPERATOR = "system:serviceaccount:kllm:operator"
BENCH = "kllm:bench"
# Priority and fairness of the API server hold for the operator as for any service account.
_USERS = {
    BENCH: ("bench", "system:masters"),
    OPERATOR: ("operator", "system:serviceaccounts,system:serviceaccounts:kllm"),
}
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}],
}


@dataclass(frozen=True)
class ControlPlane:
    """A running API server.

    Attributes:
        folder: of its files.
        programs: folder of kubectl and the others.
        tokens: by user.
        pids: of its processes, by name.
    """

    folder: Path
    programs: Path
    tokens: dict[str, str]
    pids: dict[str, int]

    @property
    def server(self) -> str:
        """Its address."""
        return _SERVER

    @property
    def certificate(self) -> Path:
        """Its certificate, which it has signed itself."""
        return self.folder / "pki" / "apiserver.crt"

    @property
    def audit(self) -> Path:
        """A line of JSON per request of the operator that has ended."""
        return self.folder / "audit.log"

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig for a user."""
        path = self.folder / f"{_USERS[user][0]}.kubeconfig"
        authority = base64.b64encode(self.certificate.read_bytes()).decode()
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": _SERVER, "certificate-authority-data": authority}}],
            "users": [{"name": "u", "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))
        return path


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Run both in a new folder, until left; its files stay.

    Raises:
        RuntimeError: the API server did not come up; its log says why.
    """
    programs = binaries.ensure(Layout.of_environment(), only=("kube-apiserver", "kubectl"))
    (folder / "pki").mkdir(parents=True)
    tokens = {user: secrets.token_hex(16) for user in _USERS}
    rows = [f'{tokens[user]},{user},{user},"{groups}"' for user, (_, groups) in _USERS.items()]
    _write(folder / "pki" / "tokens.csv", "\n".join(rows) + "\n")
    _write(folder / "audit.yaml", json.dumps(_AUDIT))
    key = folder / "pki" / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=_END_SECONDS)
    processes = []
    try:
        for name, command in _commands(folder, programs).items():
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder))
        plane = ControlPlane(folder, programs, tokens, {"etcd": processes[0].pid, "kube-apiserver": processes[1].pid})
        _wait_until_ready(plane, processes)
        _kubectl(plane, "create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", f"--user={OPERATOR}")
        yield plane
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _commands(folder: Path, programs: Path) -> dict[str, list[str]]:
    key = str(folder / "pki" / "service-accounts.key")
    return {
        "etcd": [
            shutil.which("etcd") or "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={_DATABASE}",
            f"--advertise-client-urls={_DATABASE}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            str(programs / "kube-apiserver"),
            f"--etcd-servers={_DATABASE}",
            f"--advertise-address={ADDRESS}",
            "--secure-port=6443",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={folder / 'pki'}",
            f"--token-auth-file={folder / 'pki' / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--audit-policy-file={folder / 'audit.yaml'}",
            f"--audit-log-path={folder / 'audit.log'}",
        ],
    }


def _wait_until_ready(plane: ControlPlane, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            told = (plane.folder / "kube-apiserver.log").read_text()[-2000:]
            raise RuntimeError(f"the API server did not come up:\n{told}")
        if plane.certificate.exists() and _kubectl(plane, "get", "--raw=/readyz", check=False) == 0:
            return
        time.sleep(0.2)


def _kubectl(plane: ControlPlane, *arguments: str, check: bool = True) -> int:
    command = [str(plane.programs / "kubectl"), f"--kubeconfig={plane.kubeconfig(BENCH)}", *arguments]
    return subprocess.run(command, check=check, capture_output=True, timeout=_END_SECONDS).returncode


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
