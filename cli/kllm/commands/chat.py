"""`kllm chat`: ask one question."""

from __future__ import annotations

import sys

from kllm.chat import ChatError, Measured, Question, Router
from kllm.running import find_running
from kllm_operator.substrate.rundir import RunDirectory


def run(question: Question, *, url: str | None, stream: bool, api_key: str | None = None) -> int:
    """Returns 0 with an answer, 1 without, 2 when there is nothing to ask."""
    if url is None:
        url, problem = _url_of_the_one_that_is_up()
        if url is None:
            print(f"kllm: {problem}", file=sys.stderr)
            return 2
    try:
        with Router(url, api_key=api_key) as router:
            if stream:
                for piece in router.stream(question, Measured()):
                    print(piece, end="", flush=True)
                print()
            else:
                print(router.answer(question))
    except ChatError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _url_of_the_one_that_is_up() -> tuple[str | None, str]:
    names, problem = find_running(None)
    if problem is not None:
        return None, problem
    if len(names) > 1:
        return None, f"several services are up ({', '.join(names)}); choose one with --url"
    state = RunDirectory(names[0]).read_state()
    if state is None or state.url is None or state.phase != "Serving":
        return None, f"service {names[0]!r} is still starting; see: kllm status"
    return state.url, ""
