"""Entry point of the `kllm` command. Commands are imported when they run, so that `--help` is instant."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from kllm.sim.main import app as simulate

app = typer.Typer(
    name="kllm",
    help="Elastic prefill and decode pools for large language models, from one manifest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(simulate)

OptionalName = Annotated[
    str | None, typer.Argument(help="Name of the service (metadata.name); left out: the one that is up.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[str | None, typer.Option(help="Base address of a router; left out: that of the service that is up.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kllm {importlib.metadata.version('kllm')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def up(
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifest with one InferenceService (YAML or JSON).")],
    host: Annotated[str, typer.Option(help="Address that the router listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of the router; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = 0,
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Keys that clients may use; left out: none needed.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where models are kept; left out: $XDG_CACHE_HOME/kllm or ~/.cache/kllm.")
    ] = None,
    pace: Annotated[
        str | None,
        typer.Option(help="How long the engines' steps are made to last: prefill=0.02+0.0005n,decode=0.03+0.002b."),
    ] = None,
    tune: Annotated[
        list[str] | None, typer.Option(help="A setting of the control loop, NAME=NUMBER; see docs/planner.md.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine whose timing the planner begins with: a name, or a .json file of `kllm calibrate`."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write what the control loop decides from to this new file, for `kllm replay`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event instead of text.")] = False,
) -> None:
    """Serve a model on this machine until Ctrl-C.

    Starts minReplicas of both roles and one router, then keeps each pool between minReplicas and maxReplicas as its
    load asks for, and replaces instances that fail. Requests in work have 0.3 s to finish; streams that are cut end
    with an error event. A second Ctrl-C ends everything at once.
    """
    from kllm.commands import up as command  # noqa: PLC0415
    from kllm_operator.substrate.programs import RouterAddress  # noqa: PLC0415

    address = RouterAddress(host, port, grpc_port, api_key_file)
    tuning = command.Tuning(pace, tuple(tune or ()), engine, record)
    raise typer.Exit(command.run(file, address=address, cache_dir=cache_dir, as_json=json, tuning=tuning))


@app.command()
def status(
    name: OptionalName = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it every two seconds until Ctrl-C.")] = False,
) -> None:
    """Show what is up on this machine: pools and their load, instances, memory and addresses."""
    from kllm.commands import status as command  # noqa: PLC0415

    if watch and not json:
        raise typer.Exit(command.watch(name, seconds=2.0))
    raise typer.Exit(command.run(name, as_json=json))


@app.command()
def down(
    name: OptionalName = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait before everything is killed.")] = 10.0,
) -> None:
    """Stop a service, or clean up after one whose `kllm up` was killed."""
    from kllm.commands import down as command  # noqa: PLC0415

    raise typer.Exit(command.run(name, timeout_seconds=timeout))


@app.command()
def chat(
    message: Annotated[str, typer.Argument(help="What to say; `-` reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Model name; left out: the first that the router lists.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="Randomness; left out: the model's default.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the answer while it is made.")] = True,
    url: Url = None,
    api_key: Annotated[str | None, typer.Option(envvar="KLLM_API_KEY", help="Key, if the router asks for one.")] = None,
) -> None:
    """Ask one question and print the answer."""
    from kllm.chat import Question  # noqa: PLC0415
    from kllm.commands import chat as command  # noqa: PLC0415

    text = sys.stdin.read() if message == "-" else message
    if not text.strip():
        raise typer.BadParameter("there is nothing to say", param_hint="MESSAGE")
    question = Question(text, model=model, max_tokens=max_tokens, temperature=temperature, system=system)
    raise typer.Exit(command.run(question, url=url, stream=stream, api_key=api_key))


@app.command()
def demo(
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifest to serve.")] = Path(
        "examples/inferenceservice.yaml"
    ),
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where models are kept; left out: $XDG_CACHE_HOME/kllm or ~/.cache/kllm.")
    ] = None,
) -> None:
    """Serve a model on a free port, stream one answer from it, stop everything, and print what was measured."""
    from kllm.commands import demo as command  # noqa: PLC0415

    raise typer.Exit(command.run(file, cache_dir=cache_dir))


@app.command()
def bench(
    rate: Annotated[float | None, typer.Option(help="Requests per second; with --duration.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of load; cuts a trace.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson or constant.")] = "poisson",
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Replay a file: Mooncake JSON lines, Azure or ServeGen CSV."),
    ] = None,
    speed: Annotated[float | None, typer.Option(help="Replay that many times as fast.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay the first so many requests.")] = None,
    isl: Annotated[
        str | None, typer.Option(help="Prompt tokens: 512, uniform:100-900 or lognormal:512:0.6. \\[default: 512]")
    ] = None,
    osl: Annotated[str | None, typer.Option(help="Answer tokens, likewise. \\[default: 128]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same load.")] = 0,
    url: Annotated[
        str | None, typer.Option(help="Base address of the endpoint; left out: that of the service that is up.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; left out: the first that is listed.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KLLM_API_KEY", help="Key, if it asks for one.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of exact length (SGLang, vLLM).")
    ] = True,
    max_in_flight: Annotated[int, typer.Option(min=1, help="A request beyond counts as rejected.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 120.0,
    drain: Annotated[
        float | None, typer.Option(help="Seconds to wait after the last request; left out: the timeout.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, one by one, and not counted.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective for the time to first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective for the time per token after it.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every request and the summary here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG here; needs matplotlib.")] = None,
) -> None:
    """Send a load to any OpenAI endpoint in open loop and report latencies and SLO attainment.

    Requests go out at their times, whether or not earlier ones are answered. Ctrl-C ends it with a report.
    """
    from kllm.bench.arrivals import Arrivals  # noqa: PLC0415
    from kllm.bench.settings import Settings  # noqa: PLC0415
    from kllm.commands import bench as command  # noqa: PLC0415

    if arrivals not in set(Arrivals):
        raise typer.BadParameter(f"{arrivals!r} must be poisson or constant", param_hint="--arrivals")
    if endpoint not in {"completions", "chat"}:
        raise typer.BadParameter(f"{endpoint!r} must be completions or chat", param_hint="--endpoint")
    settings = Settings(
        rate=rate, duration=duration, arrivals=Arrivals(arrivals), trace=trace, speed=speed, limit=limit,
        isl=isl, osl=osl, seed=seed, url=url, model=model, api_key=api_key, chat=endpoint == "chat",
        ignore_eos=ignore_eos, max_in_flight=max_in_flight, timeout=timeout, drain=drain, warmup=warmup,
        ttft_ms=ttft_ms, tpot_ms=tpot_ms, json=json, plot=plot,
    )  # fmt: skip
    raise typer.Exit(command.run(settings))


@app.command()
def replay(
    history: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="What `--record` of `kllm up` or `kllm simulate` wrote, or the operator."
        ),
    ],
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifest of the service, as it was or as it shall be.")],
    window: Annotated[str | None, typer.Option(help="Part of it, BEGIN:END in seconds.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine whose timing the planner begins with: a name, or a .json file."),
    ] = None,
    tune: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the control loop, NAME=NUMBER; may be given again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every moment, not only changes.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write every decision here.")] = None,
) -> None:
    """Show what the planner would have done with a recorded history, moment by moment.

    Each moment is judged by the instances that there were: it is the advice that scaling External gets.
    """
    from kllm.commands import replay as command  # noqa: PLC0415

    options = command.Options(
        history, file, window=window, engine=engine, tune=tuple(tune or ()), every=every, json=json
    )
    raise typer.Exit(command.run(options))


@app.command()
def calibrate(
    url: Annotated[
        str | None, typer.Option(help="Base address of the endpoint; left out: that of the service that is up.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; left out: the first that is listed.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KLLM_API_KEY", help="Key, if it asks for one.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of prompts.")] = "128,512,1024,2048,4096",
    batches: Annotated[str, typer.Option(help="Answers that are generated together.")] = "1,2,4,8,16,32",
    answer_tokens: Annotated[int, typer.Option(min=16, help="Of each answer of a batch.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 3,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of one prefill step of the engine.")] = 8192,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV pool of the engine; it is not measured, and simulations need it.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the engine's file here (.json).")] = None,
) -> None:
    """Fit the timing model to an engine that runs: prompts of some lengths, and answers of some batches.

    For `kllm simulate --engine` and `kllm up --engine`. The endpoint is an engine, or a service with one prefill and
    one decode instance, and must serve nobody else meanwhile. Ctrl-C ends it with what was measured, if it is enough.
    """
    from kllm.calibration.settings import Settings  # noqa: PLC0415
    from kllm.commands import calibrate as command  # noqa: PLC0415

    settings = Settings(
        url=url, model=model, api_key=api_key, lengths=lengths, batches=batches, answer_tokens=answer_tokens,
        repeats=repeats, chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, timeout=timeout, seed=seed, out=out,
    )  # fmt: skip
    raise typer.Exit(command.run(settings))


@app.command()
def explain(
    name: OptionalName = None,
    outcome: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Of `kllm simulate --json`, instead of a service.")
    ] = None,
    at: Annotated[float | None, typer.Option(min=0, help="Second of it; left out: the last decision.")] = None,
    policy: Annotated[str | None, typer.Option(help="Which of several in it.")] = None,
) -> None:
    """Argue the last decision of a service that is up here, or that of a simulation at some time.

    Which load decided, what one instance fewer or more would have done, and what it waits for. For services on a
    cluster: kubectl kllm explain.
    """
    from kllm.commands import explain as command  # noqa: PLC0415

    raise typer.Exit(command.run(name, outcome=outcome, at=at, policy=policy))


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
