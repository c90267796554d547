"""Whether a port is free, and who has it if not."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from kllm_operator.substrate.rundir import RunDirectory, service_names


def refusal(host: str, port: int, *, option: str) -> str | None:
    """Why the router could not listen there, with what helps; None if it could.

    Args:
        host: name or address to listen on.
        port: 0 is always free.
        option: the command line's option for this port.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"--host {host!r} is no address of this machine: {error.strerror}"
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                if error.errno is not None and port and "in use" in str(error.strerror):
                    owner = _owner(port)
                    return f"port {port} is in use{f' by {owner}' if owner else ''}; choose another with {option} PORT"
                return f"the router cannot listen on {host}:{port}: {error.strerror}"
    return None


def _owner(port: int) -> str | None:
    for name in service_names():
        run = RunDirectory(name)
        state = run.read_state()
        if state is not None and state.url is not None and run.is_owned and urlsplit(state.url).port == port:
            return f"the kllm service {name!r}"
    import psutil  # noqa: PLC0415 - only needed to explain

    try:
        for connection in psutil.net_connections(kind="tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return None
    return None
