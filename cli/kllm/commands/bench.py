"""`kllm bench`: send a load to an OpenAI endpoint and tell how it was served."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from kllm.bench.exceptions import BenchError, OptionError
from kllm.bench.files import write_json
from kllm.bench.machine import allow_connections
from kllm.bench.plan import Planned
from kllm.bench.plot import draw
from kllm.bench.report import text_of
from kllm.bench.session import Result, Session
from kllm.bench.settings import Settings
from kllm.finding import address_of_the_one


def run(settings: Settings) -> int:
    """Returns 0 with an answer, 1 without any, 2 when an option is wrong, 130 when interrupted."""
    try:
        settings.check()
        plan = settings.plan()
        settings = _with_address(settings)
        allow_connections(settings.max_in_flight)
        result = asyncio.run(_measure(settings, plan))
    except OptionError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the load, which handles the signal itself
        return 130
    print(text_of(result.summary, title=result.title, goals=settings.goals))
    is_written = _write(result)
    if result.summary.is_interrupted:
        return 130
    return 0 if result.summary.ok and is_written else 1


def _with_address(settings: Settings) -> Settings:
    """With the address of the service that is up, if none was given."""
    if settings.url is not None:
        return settings
    url, problem = address_of_the_one()
    if url is None:
        raise OptionError("--url", problem)
    return replace(settings, url=url)


async def _measure(settings: Settings, plan: list[Planned]) -> Result:
    return await Session(settings, plan).run()


def _write(result: Result) -> bool:
    settings = result.settings
    try:
        if settings.json is not None:
            write_json(settings.json, result.document())
        if settings.plot is not None:
            draw(result.rows, settings.plot, title=result.title, goals=settings.goals)
    except OSError as error:
        print(f"kllm: the results could not be written: {error}", file=sys.stderr)
        return False
    return True
