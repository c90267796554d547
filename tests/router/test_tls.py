"""HTTPS, with certificates that change."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest
from router.fake_engine import stream
from router.router_helpers import Client, router, until

from kllm_router.frontend.certificates import CertificateError, follow_certificate, server_context
from kllm_router.frontend.http_server import HttpServer


def certificate(folder, name):
    """A self-signed one, in two files."""
    chain, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    return {name: certificate(folder, name) for name in ("first", "second")}


@pytest.fixture
def mounted(pairs, tmp_path):
    """Files that the server reads, at first those of the first pair."""
    paths = tmp_path / "tls.crt", tmp_path / "tls.key"
    for source, path in zip(pairs["first"], paths, strict=True):
        shutil.copy(source, path)
    return paths


async def served(port, pairs, name, **settings):
    """A connection that trusts one certificate only."""
    context = ssl.create_default_context(cafile=pairs[name][0])
    for key, value in settings.items():
        setattr(context, key, value)
    return Client(*await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost"))


async def test_streams_and_refusals_come_whole_over_tls(pairs, mounted):
    async with router() as r:
        server = HttpServer(r.server.application, r.client.settings)
        _, port = await server.start(("127.0.0.1", 0), tls=server_context(*mounted))
        r.prefill_when_asked()
        r.decode.script = stream("a" * 100_000)
        client = await served(port, pairs, "first")
        client.post(stream=True)
        answer = await client.answer()
        assert answer.status == 200
        assert len(answer.body) > 100_000
        client.request("GET", "/nowhere", headers={"connection": "close"})
        assert (await client.answer()).status == 404
        assert await client.closed()
        bad = await served(port, pairs, "first")
        bad.send(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        assert (await bad.answer()).status == 400
        assert await bad.closed()
        await server.close(drain_seconds=0)


async def test_a_new_certificate_is_used_for_new_connections_and_a_bad_one_never(pairs, mounted):
    told = []
    context = server_context(*mounted)
    following = asyncio.create_task(follow_certificate(context, *mounted, on_reload=told.append, seconds=0.01))
    async with router() as r:
        server = HttpServer(r.server.application, r.client.settings)
        _, port = await server.start(("127.0.0.1", 0), tls=context)
        old = await served(port, pairs, "first")

        shutil.copy(pairs["second"][0], mounted[0])  # of another key, as in the middle of an exchange
        await until(lambda: False in told)
        (await served(port, pairs, "first")).leave()
        shutil.copy(pairs["second"][1], mounted[1])
        await until(lambda: told and told[-1])
        new = await served(port, pairs, "second")
        for client in (old, new):
            client.request("GET", "/healthz")
            assert (await client.answer()).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await served(port, pairs, "first")
        await server.close(drain_seconds=0)
    following.cancel()


async def test_clients_of_old_protocols_and_those_that_never_shake_hands_are_let_go(pairs, mounted):
    async with router(head_seconds=0.2) as r:
        server = HttpServer(r.server.application, r.client.settings)
        _, port = await server.start(("127.0.0.1", 0), tls=server_context(*mounted))
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(silent.read(), 5) == b""
        writer.close()
        plain = Client(*await asyncio.open_connection("127.0.0.1", port))
        plain.request("GET", "/healthz")
        assert b"HTTP" not in await asyncio.wait_for(plain.reader.read(), 5)
        await server.close(drain_seconds=0)


def test_files_that_cannot_be_used_are_named(pairs, tmp_path):
    for chain, key in (
        (tmp_path / "nowhere", pairs["first"][1]),
        (pairs["first"][0], pairs["second"][1]),
        (pairs["first"][1], pairs["first"][1]),
    ):
        with pytest.raises(CertificateError, match=str(chain)):
            server_context(chain, key)
