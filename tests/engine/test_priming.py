"""The scheduler takes resumed ids at the end of a prompt for output that it has sampled before."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kllm_engine.sglang import priming
from kllm_engine.sglang.continuation import RESUMED_COUNT


class Request:
    """SGLang's Req, as far as it matters; each id is a byte."""

    def __init__(self, prompt: bytes, resumed: bytes, output: bytes = b"", *, stop: tuple[str, ...] = ()) -> None:
        self.origin_input_ids = array("q", list(prompt + resumed))
        self.output_ids = array("q", list(output))
        self.tokenizer = SimpleNamespace(decode=lambda ids: bytes(list(ids)).decode())
        self.sampling_params = SimpleNamespace(
            custom_params={RESUMED_COUNT: len(resumed)} if resumed else None, stop_strs=list(stop), stop_regex_strs=[],
            stop_str_max_len=max(map(len, stop), default=0), stop_regex_max_len=0,
        )  # fmt: skip
        self.grammar: Any = None
        self.to_finish: Any = None
        self.aborted = ""

    def finished(self) -> bool:
        return False

    def set_finish_with_abort(self, message: str) -> None:
        self.aborted, self.grammar, self.to_finish = message, None, "abort"

    def tail(self, new_tokens: int = 1) -> str:
        """SGLang's own."""
        length = min(self.sampling_params.stop_str_max_len + new_tokens, len(self.output_ids))
        return self.tokenizer.decode(self.output_ids[-length:]) if length else ""


class Grammars:
    """SGLang's GrammarManager, whose grammars are ready or not."""

    def __init__(self, *, ready: bool = True) -> None:
        self.reasoned: list[list[int]] = []
        update = lambda request, ids: self.reasoned.append(ids)  # noqa: E731
        processor = SimpleNamespace(_maybe_update_reasoning_tokens=update)
        self.scheduler = SimpleNamespace(batch_result_processor=processor)
        self._ready = ready

    def process(self, _manager, request) -> bool:
        request.grammar = Grammar("abcdefgh") if self._ready else object()
        return not self._ready


class Grammar:
    """Accepts one text."""

    def __init__(self, text: str) -> None:
        self.text, self.accepted, self.current_token = text, "", None

    def accept_token(self, token: int) -> None:
        self.current_token = token
        self.accepted += chr(token)
        if not self.text.startswith(self.accepted):
            raise ValueError(self.accepted)


def queued(request: Request, grammars: Grammars | None = None) -> Request:
    grammars = grammars or Grammars()
    priming.process_grammar(grammars.process, grammars, request)
    return request


def test_a_grammar_has_taken_the_resumed_ids_and_waits_for_the_first_new_one():
    request = queued(Request(b"xyz", b"abc"))

    assert request.grammar.accepted == "abc"
    # SGLang's decode side asks for this to know whether the first token was taken already.
    assert request.grammar.current_token is None


def test_a_grammar_that_compiles_later_takes_them_then():
    grammars = Grammars(ready=False)
    request = queued(Request(b"xyz", b"abc"), grammars)
    request.grammar = Grammar("abcdefgh")

    priming.ready_grammars([request, queued(Request(b"xyz", b""))], grammars)

    assert request.grammar.accepted == "abc"


def test_ids_that_break_the_grammar_end_the_request_and_nothing_else():
    request = queued(Request(b"xyz", b"abq"))

    assert "kllm_resume_output_ids does not follow the request's grammar" in request.aborted


def test_reasoning_tokens_are_counted_from_the_resumed_ids_on():
    grammars = Grammars()
    queued(Request(b"xyz", b"abc"), grammars)
    queued(Request(b"xyz", b""), grammars)

    assert grammars.reasoned == [list(b"abc")]


@pytest.mark.parametrize("count", [0, -1, 3, 99, "2", None, True])
def test_a_count_that_cannot_be_is_ignored(count):
    request = Request(b"xyz", b"")
    request.sampling_params.custom_params = {RESUMED_COUNT: count}
    queued(request)

    assert request.grammar.accepted == ""


def tail(request: Request, new_tokens: int = 1) -> str:
    return priming.tail_text(lambda own, new=1: own.tail(new), request, new_tokens)


@pytest.mark.parametrize("output", [b"d", b"de", b"def", b"defghij"])
def test_a_stop_string_is_searched_in_the_text_of_an_undisturbed_run(output):
    stop = ("wxyz",)
    resumed = queued(Request(b"prompt", b"abc", output, stop=stop))
    undisturbed = queued(Request(b"prompt", b"", b"abc" + output, stop=stop))

    assert tail(resumed) == tail(undisturbed)


def test_requests_without_stop_strings_or_resumed_ids_are_left_to_sglang():
    for request in (queued(Request(b"p", b"abc", b"d")), queued(Request(b"p", b"", b"d", stop=("x",)))):
        assert priming.tail_text(lambda *_: "own", request) == "own"


def test_the_end_of_a_stop_string_is_counted_in_new_output():
    request = queued(Request(b"prompt", b"abc", b"de", stop=("cd",)))
    own = request.output_ids

    def position(request, new_tokens, *, stop_str):
        assert new_tokens == 2
        return bytes(list(request.output_ids)).index(stop_str.encode()) + len(stop_str)

    assert priming.stop_position(position, request, 2, stop_str="cd") == 1
    assert request.output_ids is own


def penalizer(name: str, strengths: list[float], initial: float):
    kind = type(f"Batched{name.capitalize()}Penalizer", (), {"is_prepared": lambda _: True})
    made = kind()
    setattr(made, f"cumulated_{name}_penalties", torch.full((len(strengths), 8), initial))
    setattr(made, f"{name}_penalties", torch.tensor(strengths).unsqueeze(1))
    return made


@pytest.mark.parametrize(
    ("name", "initial", "expected"),
    [("frequency", 0.0, [0, 1.0, 0.5, 0]), ("presence", 0.0, [0, 0.5, 0.5, 0]), ("repetition", 1.0, [1, 0.5, 0.5, 1])],
)
def test_penalties_count_resumed_ids_in_their_row_alone(name, initial, expected):
    requests = [queued(Request(b"\1\2\3", b"")), queued(Request(b"\5", b"\1\2\1"))]
    made = penalizer(name, [0.7, 0.5], initial)
    orchestrator = SimpleNamespace(is_required=True, penalizers={0: made, 1: SimpleNamespace()})

    priming.sampling_info(SimpleNamespace(penalizer_orchestrator=orchestrator), None, SimpleNamespace(reqs=requests), 8)

    state = getattr(made, f"cumulated_{name}_penalties").tolist()
    assert state[0] == [initial] * 8
    assert state[1] == [*expected, *[initial] * 4]
