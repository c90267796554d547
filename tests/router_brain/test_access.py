"""The way to the API server, from a pod's files and from kubeconfig files."""

from __future__ import annotations

import base64
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kllm_router.discovery.access import Access, from_kubeconfig, in_cluster
from kllm_router.discovery.exceptions import AccessError


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate and its key."""
    folder = tmp_path_factory.mktemp("pair")
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=kllm", "-keyout", files[1], "-out", files[0]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def service_account(folder: Path, certificate: Path) -> Path:
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("models")
    (folder / "ca.crt").write_bytes(certificate.read_bytes())
    return folder


def written(path: Path, *, user: Any = None, cluster: Any = None, **changes: Any) -> Path:
    """A kubeconfig file."""
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "clusters": [{"name": "c", "cluster": cluster or {"server": "https://10.0.0.1:6443/"}}],
        "users": [{"name": "u", "user": user or {"token": "abc"}}],
        **changes,
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_pod_is_its_service_account_and_reads_a_replaced_token(tmp_path, pair):
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = in_cluster(folder=service_account(tmp_path, pair[0]), environment=environment)
    assert (access.server, access.namespace) == ("https://10.96.0.1:6443", "models")
    access.check()
    assert access.headers() == {"authorization": "Bearer first"}
    (tmp_path / "token").write_text("second")
    assert access.headers() == {"authorization": "Bearer second"}


def test_an_address_of_ipv6_is_put_in_brackets(tmp_path, pair):
    access = in_cluster(folder=service_account(tmp_path, pair[0]), environment={"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert access.server == "https://[fd00::1]:443"


def test_outside_a_pod_it_says_what_to_give(tmp_path):
    with pytest.raises(AccessError, match="--kubeconfig"):
        in_cluster(folder=tmp_path, environment={})
    with pytest.raises(AccessError, match="token is not there"):
        in_cluster(folder=tmp_path, environment={"KUBERNETES_SERVICE_HOST": "10.96.0.1"})


def test_a_kubeconfig_names_server_namespace_and_user(tmp_path, pair):
    certificate, key = pair
    data = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
    cluster = {"server": "https://a:1/", "certificate-authority": str(certificate)}
    access = from_kubeconfig(written(tmp_path / "config", user=data, cluster=cluster))
    access.check()
    assert (access.server, access.namespace, access.headers()) == ("https://a:1", "models", {})
    assert access.tls().verify_mode is ssl.CERT_REQUIRED


def test_files_are_looked_for_beside_the_kubeconfig(tmp_path, pair):
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.pem").write_bytes(pair[0].read_bytes())
    cluster = {"server": "https://a:1", "certificate-authority": "ca.pem"}
    access = from_kubeconfig(written(tmp_path / "config", user={"tokenFile": "token"}, cluster=cluster))
    access.check()
    assert access.headers() == {"authorization": "Bearer t"}


def test_a_cluster_may_be_trusted_without_a_certificate(tmp_path):
    cluster = {"server": "https://a:1", "insecure-skip-tls-verify": True}
    assert from_kubeconfig(written(tmp_path / "config", cluster=cluster)).tls().verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"current-context": None}, "current-context"),
        ({"current-context": "there"}, "no context 'there'"),
        ({"contexts": 5}, "no context 'here'"),
        ({"clusters": []}, "no cluster 'c'"),
        ({"users": [{"name": "u"}]}, "no user 'u'"),
        ({"cluster": {"nothing": 1}}, "no server"),
        ({"user": {"exec": {"command": "x"}}}, "exec"),
        ({"user": {"client-certificate": "a"}}, "client-key"),
        ({"user": {"token": 12345678}}, "token must be text"),
        ({"user": {"tokenFile": ["t"]}}, "tokenFile must be text"),
        ({"cluster": {"server": "https://a:1", "certificate-authority": 5}}, "certificate-authority must be text"),
        ({"user": {"client-certificate-data": "?", "client-key-data": "?"}}, "client-certificate-data"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused_by_field(tmp_path, changes, said):
    path = written(tmp_path / "config", **changes)
    with pytest.raises(AccessError, match=said) as refused:
        from_kubeconfig(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["- a", "{", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path, text):
    (tmp_path / "config").write_text(text)
    with pytest.raises(AccessError, match="config"):
        from_kubeconfig(tmp_path / "config")


@pytest.mark.parametrize(
    "change",
    [
        {"authority": Path("/nowhere")},
        {"authority": "no certificate"},
        {"client_certificate": ("x", "y")},
        {"token": Path("/nowhere")},
        {"token": "two\nlines"},
        {"token": ""},
    ],
)
def test_what_cannot_be_read_is_told_without_showing_it(change):
    with pytest.raises(AccessError) as refused:
        Access(server="https://a", namespace="models", **change).check()
    assert "lines" not in str(refused.value)
