"""The components' command lines."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.layout import API_PORT, NODE_ADDRESS, NODE_NAME, POD_RANGE, SERVICE_RANGE, Layout

ETCD = "etcd"
API = "kube-apiserver"
CONTAINERD = "containerd"
KUBELET = "kubelet"
# What a person may call them on the command line.
SHORT_NAMES = {
    "apiserver": API,
    "controller-manager": "kube-controller-manager",
    "scheduler": "kube-scheduler",
    "proxy": "kube-proxy",
    "dns": "coredns",
}
_ISSUER = "https://kubernetes.default.svc"
_DATABASE = "http://127.0.0.1:2379"


def commands(layout: Layout, programs: Path) -> dict[str, list[str]]:
    """Each component's command line, in the order in which they are started.

    Args:
        layout: The cluster's folders.
        programs: The folder of the programs that were built.
    """
    key = str(layout.pki / "service-accounts.key")
    return {
        ETCD: [
            "etcd",
            f"--data-dir={layout.home / 'etcd'}",
            f"--listen-client-urls={_DATABASE}",
            f"--advertise-client-urls={_DATABASE}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # The data lives as long as the cluster: a power cut costs nothing.
            "--unsafe-no-fsync",
        ],
        API: [
            str(programs / API),
            f"--etcd-servers={_DATABASE}",
            f"--advertise-address={NODE_ADDRESS}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={layout.pki}",
            f"--token-auth-file={layout.pki / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            f"--service-account-issuer={_ISSUER}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            str(programs / "kube-controller-manager"),
            f"--kubeconfig={layout.kubeconfig_of('kube-controller-manager')}",
            f"--root-ca-file={layout.certificate}",
            f"--service-account-private-key-file={key}",
            f"--cert-dir={layout.pki}",
            "--use-service-account-credentials=true",
            f"--flex-volume-plugin-dir={layout.home / 'volume-plugins'}",
            "--leader-elect=false",
        ],
        "kube-scheduler": [
            str(programs / "kube-scheduler"),
            f"--kubeconfig={layout.kubeconfig_of('kube-scheduler')}",
            f"--cert-dir={layout.pki}",
            "--leader-elect=false",
        ],
        CONTAINERD: ["containerd", f"--config={layout.settings / 'containerd.toml'}"],
        KUBELET: [
            str(programs / KUBELET),
            f"--config={layout.settings / 'kubelet.yaml'}",
            f"--kubeconfig={layout.kubeconfig_of('kubelet')}",
            f"--cert-dir={layout.pki / 'kubelet'}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_ADDRESS}",
        ],
        "kube-proxy": [
            str(programs / "kube-proxy"),
            f"--kubeconfig={layout.kubeconfig_of('kube-proxy')}",
            f"--hostname-override={NODE_NAME}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={POD_RANGE}",
            # The limits of connection tracking are the machine's, and not the node's to set.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
        "coredns": [str(programs / "coredns"), f"-conf={layout.settings / 'Corefile'}"],
    }
