"""`kllm chat`: ask one question."""

from __future__ import annotations

import sys

from kllm.chat import ChatError, Measured, Question, Router
from kllm.finding import address_of_the_one


def run(question: Question, *, url: str | None, stream: bool, api_key: str | None = None) -> int:
    """Returns 0 with an answer, 1 without, 2 when there is nothing to ask."""
    if url is None:
        url, problem = address_of_the_one()
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
