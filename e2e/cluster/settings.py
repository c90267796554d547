"""The components' configuration files, keys and tokens."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from e2e.cluster.layout import CGROUP, DOMAIN, NODE_ADDRESS, NODE_NAME, POD_RANGE, SERVER, Layout

_OPENSSL_SECONDS = 60.0
PAUSE = "localhost/pause:1"
ADMINISTRATOR = "admin"
# Who each user of the API server is: its name there and its groups. CoreDNS reads what no role of the API server's own
# allows to one user, so it is an administrator here.
_USERS = {
    ADMINISTRATOR: ("kllm:admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kube-proxy": ("system:kube-proxy", ""),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "coredns": ("kllm:coredns", "system:masters"),
}


def write_before_the_api(layout: Layout) -> dict[str, str]:
    """Write everything that needs no certificate of the API server; returns the users' tokens."""
    for folder in (layout.home, layout.pki, layout.settings, layout.home / "cni-networks", *layout.covered):
        folder.mkdir(parents=True, exist_ok=True)
    layout.home.chmod(0o755)
    layout.pki.chmod(0o700)
    layout.settings.chmod(0o700)
    tokens = {user: secrets.token_hex(16) for user in _USERS}
    rows = [f'{tokens[user]},{name},{user},"{groups}"' for user, (name, groups) in _USERS.items()]
    _write(layout.pki / "tokens.csv", "\n".join(rows) + "\n")
    subprocess.run(
        ["openssl", "genrsa", "-out", str(layout.pki / "service-accounts.key"), "2048"],
        check=True,
        capture_output=True,
        timeout=_OPENSSL_SECONDS,
    )
    # A pod with the node's own DNS settings asks whom the machine asks.
    shutil.copyfile("/etc/resolv.conf", layout.settings / "resolv.conf")
    _write(layout.settings / "containerd.toml", _containerd(layout))
    _write(layout.settings / "kubelet.yaml", json.dumps(_kubelet(layout), indent=2))
    _write(layout.home / "cni-networks" / "10-kllm.conflist", json.dumps(_network(layout), indent=2))
    _write(layout.settings / "Corefile", _corefile(layout))
    return tokens


def write_kubeconfigs(layout: Layout, tokens: dict[str, str]) -> None:
    """Write the kubeconfigs; the API server has written its certificate by then."""
    for user, token in tokens.items():
        path = layout.kubeconfig if user == ADMINISTRATOR else layout.kubeconfig_of(user)
        _write(path, json.dumps(_kubeconfig(user, token, layout.certificate.read_bytes()), indent=2))


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _kubeconfig(user: str, token: str, certificate: bytes) -> dict[str, Any]:
    authority = base64.b64encode(certificate).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kllm", "cluster": {"server": SERVER, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "kllm", "context": {"cluster": "kllm", "user": user}}],
        "current-context": "kllm",
    }


def _containerd(layout: Layout) -> str:
    """Containerd's settings: nothing of a containerd of the machine's own is touched.

    `restrict_oom_score_adj` lets it run where the machine's root may not lower scores, as in a sandbox.
    """
    return f"""version = 2
root = "{layout.home / "containerd"}"
state = "/run/containerd"
[grpc]
  address = "{layout.containerd}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{layout.home / "containerd-opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.home / "cni-networks"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def _kubelet(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{layout.containerd}",
        "volumePluginDir": str(layout.home / "volume-plugins"),
        "resolvConf": str(layout.settings / "resolv.conf"),
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": DOMAIN,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "maxPods": 250,
        "serializeImagePulls": False,
        "containerLogMaxSize": "50Mi",
    }


def _network(layout: Layout) -> dict[str, Any]:
    """Pods on links of their own: all their packets are routed, so Services work without bridge filtering."""
    addresses = {
        "type": "host-local",
        "dataDir": str(layout.home / "addresses"),
        "ranges": [[{"subnet": POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": "kllm",
        "plugins": [
            {"type": "ptp", "ipMasq": True, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _corefile(layout: Layout) -> str:
    return f""".:53 {{
  bind {NODE_ADDRESS}
  errors
  ready 127.0.0.1:8181
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {layout.kubeconfig_of("coredns")}
    pods insecure
    ttl 2
  }}
  loadbalance
}}
"""
