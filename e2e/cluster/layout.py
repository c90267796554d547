"""Where the cluster keeps its files and which addresses it has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "kllm-node"
HOST_LINK = "kllm0"
NODE_LINK = "eth0"
HOST_ADDRESS = "10.245.0.1"
NODE_ADDRESS = "10.245.0.2"
LINK_PREFIX = 30
POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
DOMAIN = "cluster.local"
API_PORT = 6443
SERVER = f"https://{NODE_ADDRESS}:{API_PORT}"
CGROUP = "kllm-cluster"
GO_MODULE = Path(__file__).parent / "go"


@dataclass(frozen=True)
class Layout:
    """The folders of one cluster.

    Attributes:
        home: Everything that a running cluster writes; removed when it is taken down.
        cache: Binaries, kept from one cluster to the next.
    """

    home: Path
    cache: Path

    @classmethod
    def of_environment(cls) -> Layout:
        """The layout that KLLM_CLUSTER_HOME and XDG_CACHE_HOME ask for."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        home = Path(os.environ.get("KLLM_CLUSTER_HOME") or "/var/lib/kllm-cluster")
        return cls(home=home, cache=caches / "kllm" / "cluster")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.home / "kubeconfig"

    @property
    def pki(self) -> Path:
        """The folder of keys, certificates and tokens."""
        return self.home / "pki"

    @property
    def certificate(self) -> Path:
        """The API server's certificate and its authority's, which the API server writes itself."""
        return self.pki / "apiserver.crt"

    @property
    def settings(self) -> Path:
        """The folder of the components' configuration files."""
        return self.home / "settings"

    @property
    def logs(self) -> Path:
        """The components' output, one file each, and the pods'."""
        return self.home / "log"

    @property
    def kubelet(self) -> Path:
        """What the kubelet writes, volumes among it."""
        return self.home / "kubelet"

    @property
    def covered(self) -> dict[Path, Path]:
        """The machine's folders that components write to whatever they are told, by the node's own that cover them."""
        return {
            self.logs: Path("/var/log"),
            self.home / "cni": Path("/var/lib/cni"),
            self.kubelet: Path("/var/lib/kubelet"),
        }

    @property
    def control(self) -> Path:
        """The socket on which the node takes orders."""
        return self.home / "node.sock"

    @property
    def containerd(self) -> Path:
        """The container runtime's socket."""
        return self.home / "containerd.sock"

    def kubeconfig_of(self, user: str) -> Path:
        """The kubeconfig of one component."""
        return self.settings / f"{user}.kubeconfig"
