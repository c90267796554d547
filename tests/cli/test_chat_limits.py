"""How long `kllm chat` waits for a router that says nothing."""

import pytest
from cli.cli_helpers import listener

from kllm.chat import ChatError, Limits, Measured, Question, Router

SHORT = Limits(models=0.1, stream=0.2, whole=0.3)


@pytest.mark.parametrize(
    ("ask", "seconds"),
    [
        (lambda router: router.first_model(), "0.1"),
        (lambda router: list(router.stream(Question("hello", model="m"), Measured())), "0.2"),
        (lambda router: router.answer(Question("hello", model="m")), "0.3"),
    ],
)
def test_a_router_that_takes_a_question_and_is_silent_is_given_up(ask, seconds):
    with (
        listener() as port,
        Router(f"http://127.0.0.1:{port}", limits=SHORT) as router,
        pytest.raises(ChatError, match=f"sent nothing for {seconds} s; see: kllm status"),
    ):
        ask(router)
