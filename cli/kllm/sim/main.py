"""The options of `kllm simulate`. What carries them out is imported when it runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kllm.sim.options import Options

app = typer.Typer(
    name="simulate",
    add_completion=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LOAD, _SERVICE, _LAW, _TOLD = "Load", "Service", "What decides", "Results"

File = Annotated[
    Path | None,
    typer.Option(
        "-f", "--file", help="Manifest with one InferenceService: objectives, bounds, slots, budget.",
        rich_help_panel=_SERVICE,
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Recorded requests: Mooncake JSON lines, Azure or ServeGen CSV.",
        rich_help_panel=_LOAD,
    ),
]  # fmt: skip
Ramp = Annotated[
    str | None, typer.Option(help="Steps of a rate, RATE:SECONDS,… such as 2:330,4:360.", rich_help_panel=_LOAD)
]
Isl = Annotated[
    str | None,
    typer.Option(
        help="Prompt tokens: 4000, uniform:100-900 or lognormal:512:0.6; in place of a trace's own.",
        rich_help_panel=_LOAD,
    ),
]
Osl = Annotated[str | None, typer.Option(help="Answer tokens, likewise.", rich_help_panel=_LOAD)]
Spread = Annotated[str, typer.Option(help="Of a ramp: poisson or constant.", rich_help_panel=_LOAD)]
Window = Annotated[
    str | None, typer.Option(help="Part of a trace, BEGIN:END in its seconds; either may be empty.",
                             rich_help_panel=_LOAD)
]  # fmt: skip
Limit = Annotated[int | None, typer.Option(min=1, help="The first so many requests of a trace.", rich_help_panel=_LOAD)]
Speed = Annotated[float | None, typer.Option(help="Replay that many times as fast.", rich_help_panel=_LOAD)]
Scale = Annotated[
    float | None,
    typer.Option("--scale-rate", help="Offer that many times the requests in the same time.", rich_help_panel=_LOAD),
]
Pool = Annotated[
    str, typer.Option(help="pd: prefill and decode; one: engines for whole requests.", rich_help_panel=_SERVICE)
]
Bounds = Annotated[
    str | None,
    typer.Option(help="LEAST:MOST instances of --pool one; left out: both pools' sums.", rich_help_panel=_SERVICE),
]
Initial = Annotated[
    str | None,
    typer.Option(
        help="Instances at the beginning, PREFILL,DECODE, or one number with --pool one; left out: the policy's.",
        rich_help_panel=_SERVICE,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="A known engine, or a .json file of `kllm calibrate`; left out: the manifest's, or a common one.",
        rich_help_panel=_SERVICE,
    ),
]
DecodeEngine = Annotated[
    str | None, typer.Option(help="That of decode, if it is another one.", rich_help_panel=_SERVICE)
]
Price = Annotated[
    str | None,
    typer.Option(
        help="Of a GPU, PREFILL,DECODE, or one number with --pool one; left out: the manifest's. "
        "Cost is GPU seconds times it.",
        rich_help_panel=_SERVICE,
    ),
]
StartSeconds = Annotated[
    float, typer.Option(min=0, help="From the decision to a serving instance.", rich_help_panel=_SERVICE)
]
SlotSeconds = Annotated[float, typer.Option(min=0, help="The same from a slot.", rich_help_panel=_SERVICE)]
StartSpread = Annotated[
    float, typer.Option(min=0, help="Coefficient of variation of those times.", rich_help_panel=_SERVICE)
]
Failing = Annotated[
    str | None,
    typer.Option(
        "--failures", help="Deaths per hour of each instance, and single ones as POOL@SECONDS: 0.5,decode@600.",
        rich_help_panel=_SERVICE,
    ),
]  # fmt: skip
Routed = Annotated[
    str,
    typer.Option(
        "--routing", help="kllm, least-load, round-robin, or as dynamo, cache-aware (SMG) or llm-d.",
        rich_help_panel=_SERVICE,
    ),
]  # fmt: skip
Ordered = Annotated[
    str,
    typer.Option(
        "--prefill-order", help="fcfs, or fair: the engines' own; it takes longer where queues are long.",
        rich_help_panel=_SERVICE,
    ),
]  # fmt: skip
Policy = Annotated[
    str,
    typer.Option(
        help="slo is kLLM's own; static:P,D (or static:N), hpa, llm-d, llm-d-token-aware, llm-d-wva, dynamo, aibrix, "
        "kthena, clairvoyant.",
        rich_help_panel=_LAW,
    ),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="A setting of the policy, NAME=VALUE, or POLICY.NAME=VALUE; may be given again.",
        rich_help_panel=_LAW,
    ),
]  # fmt: skip
Cold = Annotated[
    bool, typer.Option("--cold", help="kLLM's loop knows neither engines nor starts yet.", rich_help_panel=_LAW)
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same outcome.", rich_help_panel=_LOAD)]
Grace = Annotated[
    float,
    typer.Option(min=0, help="Seconds after the load until what runs counts as unfinished.", rich_help_panel=_TOLD),
]
CountFrom = Annotated[
    float,
    typer.Option(min=0, help="Count neither requests nor GPU time before this second.", rich_help_panel=_TOLD),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all of the outcome here.", rich_help_panel=_TOLD)]
Plot = Annotated[Path | None, typer.Option(help="Draw a PNG here; needs matplotlib.", rich_help_panel=_TOLD)]


@app.callback()
def simulate(
    context: typer.Context,
    trace: Trace = None,
    ramp: Ramp = None,
    isl: Isl = None,
    osl: Osl = None,
    arrivals: Spread = "poisson",
    window: Window = None,
    limit: Limit = None,
    speed: Speed = None,
    scale_rate: Scale = None,
    seed: Seed = 0,
    file: File = None,
    pool: Pool = "pd",
    bounds: Bounds = None,
    initial: Initial = None,
    engine: Engine = None,
    decode_engine: DecodeEngine = None,
    price: Price = None,
    start_seconds: StartSeconds = 60.0,
    slot_seconds: SlotSeconds = 10.0,
    start_spread: StartSpread = 0.0,
    failures: Failing = None,
    routing: Routed = "kllm",
    prefill_order: Ordered = "fcfs",
    policy: Policy = "slo",
    knobs: Knobs = None,
    cold: Cold = False,
    grace: Grace = 600.0,
    count_from: CountFrom = 0.0,
    json: Json = None,
    plot: Plot = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write what slo decides from to this new file, for `kllm replay`.", rich_help_panel=_TOLD),
    ] = None,
) -> None:
    """Simulate how a policy scales a service under a load; `kllm simulate compare` does it for several policies.

    kLLM's own planner, scheduling and engine policies run as they are, on modelled engines.
    Ctrl-C ends it early, and tells what came of it by then.
    """
    if context.invoked_subcommand is not None:
        return
    from kllm.commands import simulate as command  # noqa: PLC0415

    options = _options(
        trace=trace, ramp=ramp, isl=isl, osl=osl, arrivals=arrivals, window=window, limit=limit, speed=speed,
        scale_rate=scale_rate, pool=pool, bounds=bounds, initial=initial, engine=engine, decode_engine=decode_engine,
        price=price, start_seconds=start_seconds, slot_seconds=slot_seconds, start_spread=start_spread,
        failures=failures, routing=routing, prefill_order=prefill_order, cold=cold, grace=grace, count_from=count_from,
        knobs=tuple(knobs or ()), seed=seed, json=json, plot=plot,
    )  # fmt: skip
    raise typer.Exit(command.run(_named(file), options, policy, record=record))


@app.command()
def compare(
    policies: Annotated[
        str, typer.Option(help="Which, with commas between them, such as slo,hpa,static:2,3.", rich_help_panel=_LAW)
    ],
    jobs: Annotated[
        int | None, typer.Option(min=1, help="At a time; left out: as many as there are processors.")
    ] = None,
    trace: Trace = None,
    ramp: Ramp = None,
    isl: Isl = None,
    osl: Osl = None,
    arrivals: Spread = "poisson",
    window: Window = None,
    limit: Limit = None,
    speed: Speed = None,
    scale_rate: Scale = None,
    seed: Seed = 0,
    file: File = None,
    pool: Pool = "pd",
    bounds: Bounds = None,
    initial: Initial = None,
    engine: Engine = None,
    decode_engine: DecodeEngine = None,
    price: Price = None,
    start_seconds: StartSeconds = 60.0,
    slot_seconds: SlotSeconds = 10.0,
    start_spread: StartSpread = 0.0,
    failures: Failing = None,
    routing: Routed = "kllm",
    prefill_order: Ordered = "fcfs",
    knobs: Knobs = None,
    cold: Cold = False,
    grace: Grace = 600.0,
    count_from: CountFrom = 0.0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Simulate several policies with the same load, each in a process of its own, and show them side by side.

    Ctrl-C ends all, and tells what came of those that had begun.
    """
    from kllm.commands import simulate as command  # noqa: PLC0415

    options = _options(
        trace=trace, ramp=ramp, isl=isl, osl=osl, arrivals=arrivals, window=window, limit=limit, speed=speed,
        scale_rate=scale_rate, pool=pool, bounds=bounds, initial=initial, engine=engine, decode_engine=decode_engine,
        price=price, start_seconds=start_seconds, slot_seconds=slot_seconds, start_spread=start_spread,
        failures=failures, routing=routing, prefill_order=prefill_order, cold=cold, grace=grace, count_from=count_from,
        knobs=tuple(knobs or ()), seed=seed, json=json, plot=plot,
    )  # fmt: skip
    raise typer.Exit(command.compare(_named(file), options, policies, jobs=jobs))


def _options(*, arrivals: str, pool: str, routing: str, prefill_order: str, **values: object) -> Options:
    from kllm.bench.arrivals import Arrivals  # noqa: PLC0415
    from kllm.sim.options import Options  # noqa: PLC0415
    from kllm.sim.scenario import PrefillOrder, Routing  # noqa: PLC0415

    for option, value, known in (
        ("--arrivals", arrivals, tuple(Arrivals)), ("--pool", pool, ("pd", "one")),
        ("--routing", routing, tuple(Routing)), ("--prefill-order", prefill_order, tuple(PrefillOrder)),
    ):  # fmt: skip
        if value not in known:
            raise typer.BadParameter(f"{value!r} must be {' or '.join(known)}", param_hint=option)
    return Options(
        arrivals=Arrivals(arrivals), one_pool=pool == "one", routing=Routing(routing),
        prefill_order=PrefillOrder(prefill_order), **values,  # type: ignore[arg-type]  # as typer has checked them
    )  # fmt: skip


def _named(file: Path | None) -> Path:
    """The manifest. A group's options cannot be required, since its commands would require them too."""
    if file is None:
        raise typer.BadParameter("name the service's manifest", param_hint="-f")
    return file
