"""Entry point of `kubectl-kllm`. Commands are imported when they run, so that `--help` is instant."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kllm.kubectl.forms import Output

if TYPE_CHECKING:
    from kllm.kubectl.kubectl import Kubectl

app = typer.Typer(
    name="kubectl kllm",
    help="Services of kLLM on a cluster: what they do, why, and single instances of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace; left out: the context's.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Look into all namespaces.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; left out: the current one.")]
Kubeconfig = Annotated[str | None, typer.Option("--kubeconfig", help="Kubeconfig file; left out: kubectl's default.")]
OptionalName = Annotated[str | None, typer.Argument(metavar="[SERVICE]", help="Name of the InferenceService.")]
ServiceName = Annotated[str, typer.Argument(metavar="SERVICE", help="Name of the InferenceService.")]
InstanceName = Annotated[str, typer.Argument(metavar="INSTANCE", help="Name of the instance, which is its pod's.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kubectl-kllm {importlib.metadata.version('kllm')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def status(
    name: OptionalName = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Annotated[Output | None, typer.Option("-o", "--output", help="Form of output.")] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show all services, or one with its pools, their load, and its instances."""
    from kllm.kubectl import status as command  # noqa: PLC0415

    _check_scope(name, all_namespaces)
    _carry_out(
        lambda kubectl: command.run(kubectl, name, output),
        namespace=namespace, all_namespaces=all_namespaces, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


@app.command()
def top(
    name: OptionalName = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    once: Annotated[bool, typer.Option("--once", help="Show it once; so it is too without a terminal.")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what the engines do, until Ctrl-C: requests, KV cache, tokens per second."""
    from kllm.kubectl import top as command  # noqa: PLC0415

    _check_scope(name, all_namespaces)
    _carry_out(
        lambda kubectl: command.run(kubectl, name, once=once, every_seconds=every),
        namespace=namespace, all_namespaces=all_namespaces, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


@app.command()
def explain(
    name: ServiceName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Say why a service has the instances that it has: plan, load, limits, conditions and events."""
    from kllm.kubectl import explain as command  # noqa: PLC0415

    _carry_out(lambda kubectl: command.run(kubectl, name), namespace=namespace, context=context, kubeconfig=kubeconfig)


@app.command()
def drain(
    instance: InstanceName,
    namespace: Namespace = None,
    wait: Wait = True,
    timeout: Timeout = 600.0,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let one instance finish what it has and leave; the pool's count stays, so another one takes its place."""
    _carry_out(
        _asking(instance, "Drain", timeout_seconds=timeout if wait else 0.0),
        namespace=namespace, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


@app.command()
def flip(
    instance: InstanceName,
    namespace: Namespace = None,
    wait: Wait = True,
    timeout: Timeout = 300.0,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let one instance change its role, within the bounds of both pools."""
    _carry_out(
        _asking(instance, "Flip", timeout_seconds=timeout if wait else 0.0),
        namespace=namespace, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


@app.command()
def pause(
    name: ServiceName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Let the operator observe a service and take no step."""
    from kllm.kubectl import pausing as command  # noqa: PLC0415

    _carry_out(
        lambda kubectl: command.run(kubectl, name, pause=True),
        namespace=namespace, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


@app.command()
def resume(
    name: ServiceName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """End a pause."""
    from kllm.kubectl import pausing as command  # noqa: PLC0415

    _carry_out(
        lambda kubectl: command.run(kubectl, name, pause=False),
        namespace=namespace, context=context, kubeconfig=kubeconfig,
    )  # fmt: skip


def _check_scope(name: str | None, all_namespaces: bool) -> None:
    if name is not None and all_namespaces:
        raise typer.BadParameter("a name belongs to one namespace; leave -A out", param_hint="-A")


def _asking(instance: str, request: str, *, timeout_seconds: float) -> Callable[[Kubectl], int]:
    """The command that asks the operator for something to be done with one instance."""
    from kllm.kubectl import requests as command  # noqa: PLC0415
    from kllm_core.steps import Request  # noqa: PLC0415

    return lambda kubectl: command.run(kubectl, instance, Request(request), timeout_seconds=timeout_seconds)


def _carry_out(
    command: Callable[[Kubectl], int],
    *,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
    all_namespaces: bool = False,
) -> None:
    """Run a command; it exits with 0 when it was done, 1 when it could not be."""
    from kllm.kubectl.exceptions import PluginError  # noqa: PLC0415
    from kllm.kubectl.kubectl import Kubectl  # noqa: PLC0415

    try:
        code = command(Kubectl(namespace, all_namespaces, context, kubeconfig))
    except PluginError as error:
        print(f"kubectl kllm: {error}", file=sys.stderr)
        code = 1
    raise typer.Exit(code)


def main() -> None:
    """Run the plugin."""
    app(prog_name="kubectl kllm")


if __name__ == "__main__":
    main()
