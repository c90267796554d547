"""Command line of `kllm-router`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kllm_core.authentication import read_token_file
from kllm_core.objectives import Binding
from kllm_router.frontend.keys import ApiKey, KeysError
from kllm_router.frontend.keys import read_keys as read_key_file
from kllm_router.scheduling.budget import BudgetSettings
from kllm_router.settings import HttpLimits, RecoverySettings, Settings, Timeouts, WaitSettings
from kllm_router.shared.address import RedisAddress, parse_address
from kllm_router.shared.exceptions import AddressError


class ArgumentError(ValueError):
    """An argument, or a file that it names, cannot be used."""


@dataclass(frozen=True)
class FleetFile:
    """Instances on one machine, from a file."""

    path: Path


@dataclass(frozen=True)
class FleetPods:
    """Instances on a cluster, from its API server.

    Attributes:
        service: name of the InferenceService.
        namespace: None takes the router's own.
        kubeconfig: None takes the pod's ServiceAccount.
    """

    service: str
    namespace: str | None
    kubeconfig: Path | None


@dataclass(frozen=True)
class Certificate:
    """Files of PEM.

    Attributes:
        chain: the server's certificate, and those between it and its authority.
        key: its private key, without a passphrase.
    """

    chain: Path
    key: Path


@dataclass(frozen=True)
class Worker:
    """What a worker process has from the one that started it.

    Attributes:
        number: its place among the workers, from 0.
        socket: descriptor of the socket that it accepts clients on.
        ready: descriptor of the pipe that it tells where it listens.
        folder: where workers of one router tell each other what they do.
        replaces: whether it stands for one that has ended.
    """

    number: int
    socket: int
    ready: int
    folder: Path
    replaces: bool


@dataclass(frozen=True)
class Arguments:
    """What the router was started with.

    Attributes:
        grpc_listen: None without gRPC.
        context_tokens: None takes what instances and model say.
        parent_pid: whom to end with; None without.
        ttft_seconds: objective beyond which new requests are refused; None refuses none for being late.
        key_file: where clients' keys are; None needs none.
        keys: what it held.
        certificate: None speaks plain HTTP.
        access_log: file, or `-` for standard output; None without.
        workers: processes that serve.
        worker: None in a process that is the only one, or that starts workers.
        redis: where routers of the service tell each other what they do, or the file that says so; None shares nothing.
    """

    listen: tuple[str, int]
    grpc_listen: tuple[str, int] | None
    fleet: FleetFile | FleetPods
    token: str
    model_name: str
    tokenizer: Path
    context_tokens: int | None
    page_size: int
    binding: Binding
    ttft_seconds: float | None
    key_file: Path | None
    keys: tuple[ApiKey, ...]
    certificate: Certificate | None
    access_log: str | None
    workers: int
    worker: Worker | None
    parent_pid: int | None
    lame_duck_seconds: float
    drain_seconds: float
    log_level: str
    redis: RedisAddress | Path | None
    settings: Settings


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line and the secret files that it names.

    Raises:
        ArgumentError: a file cannot be used.
        SystemExit: with 2, the command line is wrong.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    fleet = _fleet(parser, given)
    timeouts = Timeouts(
        connect=given.connect_seconds,
        prefill=given.prefill_seconds,
        first_token=given.first_token_seconds,
        stall=given.stall_seconds,
        silence=given.silence_seconds,
        total=given.total_seconds,
    )
    http = HttpLimits(
        head_bytes=given.max_header_bytes, body_bytes=given.max_body_bytes, connections=given.max_connections
    )
    try:
        token = read_token_file(given.token_file)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--token-file: {error}") from error
    return Arguments(
        listen=given.listen,
        grpc_listen=given.grpc_listen,
        fleet=fleet,
        token=token,
        model_name=given.model_name,
        tokenizer=given.tokenizer,
        context_tokens=given.context_tokens,
        page_size=given.page_size,
        binding=given.binding,
        ttft_seconds=None if given.ttft_objective_milliseconds is None else given.ttft_objective_milliseconds / 1e3,
        key_file=given.api_key_file,
        keys=read_keys(given.api_key_file),
        certificate=_certificate(parser, given),
        access_log=given.access_log,
        workers=given.workers,
        worker=given.as_worker,
        parent_pid=given.parent_pid,
        lame_duck_seconds=given.lame_duck_seconds,
        drain_seconds=given.drain_seconds,
        log_level=given.log_level,
        redis=given.redis_url or given.redis_url_file,
        settings=Settings(
            http=http,
            timeouts=timeouts,
            recovery=RecoverySettings(
                continue_streams=given.continue_streams,
                patience_seconds=given.patience_seconds,
                budget=BudgetSettings(share=given.retry_share, floor=given.retry_floor),
            ),
            wait=WaitSettings(
                seconds=given.wait_for_start_seconds,
                requests=given.wait_for_start_requests,
                bytes=given.wait_for_start_bytes,
            ),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    defaults, http, budget = Timeouts(), HttpLimits(), BudgetSettings()
    parser = argparse.ArgumentParser(prog="kllm-router", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--listen", type=_address, default=("127.0.0.1", 8000), metavar="HOST:PORT", help="HTTP; port 0: any free one")
    add("--grpc-listen", type=_address, metavar="HOST:PORT", help="gRPC; left out: none")
    add("--discovery", choices=["file", "kubernetes"], default="file", help="who tells of the instances")
    add("--fleet", type=Path, help="with file: the file that lists the instances; watched for changes")
    add(
        "--service",
        type=_label,
        help="with kubernetes: the InferenceService, or what its pools' label kllm.io/service says",
    )
    add("--namespace", type=_label, help="with kubernetes: where its pods are; default: the router's own")
    add("--kubeconfig", type=Path, help="with kubernetes: how to reach the API server; default: the ServiceAccount")
    add("--token-file", type=Path, required=True, help="file with the fleet token")
    add("--model-name", required=True, help="name that clients give in `model`")
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="folder with the model's tokenizer and config")
    add("--context-tokens", type=_positive, help="longest prompt plus output; default: what instances and model say")
    add("--page-size", type=_positive, default=16, help="tokens per KV block")
    add("--binding", type=Binding, choices=list(Binding), default=Binding.LATE, help="when decode is chosen")
    add(
        "--ttft-objective-milliseconds",
        type=_positive,
        help="answer 429 at once to requests whose first token is expected later; with too many, keys share fairly",
    )
    add(
        "--api-key-file",
        type=Path,
        help="file with the keys that clients may use, or their SHA-256, and their limits, one a line; read again when "
        "it changes; left out: no key needed",
    )
    add("--tls-certificate-file", type=Path, metavar="PEM", help="certificate for HTTPS; read again when it changes")
    add("--tls-key-file", type=Path, metavar="PEM", help="its private key")
    add("--access-log", metavar="FILE", help="log each answer as a line of JSON, without prompts; - is standard output")
    add("--workers", type=_positive, default=1, help="processes that serve on the same port, one for each core")
    add("--as-worker", type=_worker, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help="end when this process, the parent, ends")
    add(
        "--lame-duck-seconds",
        type=_seconds,
        default=0.5,
        help="after SIGTERM, how long requests are still taken while /readyz fails",
    )
    add("--drain-seconds", type=_seconds, default=30.0, help="then, how long requests may finish")
    add("--connect-seconds", type=_seconds, default=defaults.connect, help="to connect to an engine")
    add("--prefill-seconds", type=_seconds, default=defaults.prefill, help="until a prompt is computed, queue included")
    add("--first-token-seconds", type=_seconds, default=defaults.first_token, help="from decode asked to first token")
    add("--stall-seconds", type=_seconds, default=defaults.stall, help="between two parts of a stream")
    add(
        "--silence-seconds",
        type=_seconds,
        default=defaults.silence,
        help="without a byte, until an engine that shows no work for the request counts as having lost it",
    )
    add(
        "--continue-streams",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on elsewhere with streams whose decode instance is lost",
    )
    add(
        "--patience-seconds",
        type=_seconds,
        default=RecoverySettings.patience_seconds,
        help="how long a request that has lost its instance waits when there is no other, from that one's last sign "
        "of life; 0: not at all",
    )
    add("--retry-share", type=_share, default=budget.share, help="retries per request, over ten seconds")
    add("--retry-floor", type=_count, default=budget.floor, help="retries that ten seconds always allow")
    wait = WaitSettings()
    add(
        "--wait-for-start-seconds",
        type=_seconds,
        default=wait.seconds,
        help="how long a new request waits for instances to start while none serves; 0: it is refused at once",
    )
    add("--wait-for-start-requests", type=_positive, default=wait.requests, help="most requests that wait so")
    add("--wait-for-start-bytes", type=_positive, default=wait.bytes, help="most bytes of requests that wait so")
    add("--total-seconds", type=_seconds, default=defaults.total, help="for a whole request")
    add("--max-header-bytes", type=_positive, default=http.head_bytes, help="longest head of a request")
    add("--max-body-bytes", type=_positive, default=http.body_bytes, help="largest request body")
    add("--max-connections", type=_positive, default=http.connections, help="most client connections")
    redis = parser.add_mutually_exclusive_group()
    redis.add_argument(
        "--redis-url",
        type=_redis,
        metavar="redis[s]://HOST:PORT[/DATABASE]",
        help="count what other routers of the service have in flight, told through this Redis; left out: not. A "
        "password belongs into --redis-url-file, since everyone on the machine can read arguments",
    )
    redis.add_argument(
        "--redis-url-file",
        type=Path,
        metavar="FILE",
        help="the same, from a file, with USER:PASSWORD@ before HOST; read before each connection, may come later",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser


def _fleet(parser: argparse.ArgumentParser, given: argparse.Namespace) -> FleetFile | FleetPods:
    needed, others = "service", ["fleet"]
    if given.discovery == "file":
        needed, others = "fleet", ["service", "namespace", "kubeconfig"]
    if getattr(given, needed) is None:
        parser.error(f"--discovery {given.discovery} needs --{needed}")
    for name in others:
        if getattr(given, name) is not None:
            parser.error(f"--{name} is not for --discovery {given.discovery}")
    if given.discovery == "kubernetes":
        return FleetPods(given.service, given.namespace, given.kubeconfig)
    return FleetFile(given.fleet)


def _label(text: str) -> str:
    if len(text) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name on Kubernetes")
    return text


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _redis(text: str) -> RedisAddress:
    try:
        address = parse_address(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if address.password:
        raise argparse.ArgumentTypeError("a password belongs into the file of --redis-url-file")
    return address


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds")


def _share(text: str) -> float:
    return _number(text, "a share of at least 0")


def _number(text: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def read_keys(path: Path | None) -> tuple[ApiKey, ...]:
    """Keys that clients may use; none are needed without a file.

    Raises:
        ArgumentError: the file cannot be used.
    """
    if path is None:
        return ()
    try:
        return tuple(read_key_file(path))
    except KeysError as error:
        raise ArgumentError(f"--api-key-file: {error}") from error


def _certificate(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Certificate | None:
    chain, key = given.tls_certificate_file, given.tls_key_file
    if (chain is None) != (key is None):
        parser.error("--tls-certificate-file and --tls-key-file belong together")
    return None if chain is None else Certificate(chain, key)


def write_address(host: str, port: int) -> str:
    """As in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_worker(worker: Worker) -> str:
    """Value of the flag that `parse` reads a worker from."""
    return f"{worker.number}:{worker.socket}:{worker.ready}:{int(worker.replaces)}:{worker.folder}"


def _worker(text: str) -> Worker:
    number, socket, ready, replaces, folder = text.split(":", 4)
    return Worker(int(number), int(socket), int(ready), Path(folder), replaces == "1")
