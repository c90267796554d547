"""The timing model is fitted to what is measured, and files of engines are read back."""

from __future__ import annotations

import json

import pytest
from bench.openai_server import Server
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kllm.bench.exceptions import BenchError, OptionError
from kllm.bench.row import Row
from kllm.calibration.fit import DecodePoint, FitError, PrefillPoint, fit_decode, fit_prefill, prefill_seconds
from kllm.calibration.probe import steady
from kllm.calibration.settings import Settings
from kllm.commands import calibrate as command
from kllm.main import app
from kllm.sim.engines import PRESETS, EngineError, document, engine, parse_engine
from kllm_core.timing import DecodeTiming, PrefillTiming

SERVICE = """
apiVersion: kllm.io/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "demo://smollm2-135m", name: smollm2}
  objectives: {ttftMilliseconds: 1000, tpotMilliseconds: 150}
"""
CHUNK = 2048
LENGTHS = (64, 256, 1024, 4096, 16384)
BATCHES = tuple((batch, batch * context) for context in (128, 2048) for batch in (1, 4, 16, 64))


def some(low, high):
    return st.one_of(st.just(0.0), st.floats(low, high))


@settings(deadline=None)
@given(a=st.floats(1e-3, 0.1), b=some(1e-6, 1e-3), k=some(1e-10, 1e-7))
def test_prefill_is_recovered_from_exact_measurements_in_chunks(a, b, k):
    truth = PrefillTiming(a, b, k)
    points = [PrefillPoint(n, prefill_seconds(truth, n, chunk_tokens=CHUNK)) for n in LENGTHS]
    found = fit_prefill(points, chunk_tokens=CHUNK)
    for point in points:
        assert prefill_seconds(found, point.tokens, chunk_tokens=CHUNK) == pytest.approx(point.seconds, rel=1e-3)
    assert (found.a, found.b, found.k) == pytest.approx((a, b, k), rel=1e-3, abs=1e-9)


@settings(deadline=None)
@given(a=st.floats(1e-3, 0.1), b=some(1e-6, 1e-3), c=some(1e-9, 1e-6))
def test_decode_is_recovered_from_exact_measurements(a, b, c):
    truth = DecodeTiming(a, b, c)
    found = fit_decode([DecodePoint(batch, kv, truth.seconds(batch, kv)) for batch, kv in BATCHES])
    assert (found.a, found.b, found.c) == pytest.approx((a, b, c), rel=1e-3, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 10), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_whatever_is_measured_no_coefficient_is_negative_and_none_beats_the_fit_nearby(seconds):
    points = [PrefillPoint(n, each) for n, each in zip(LENGTHS, seconds, strict=True)]
    found = fit_prefill(points, chunk_tokens=CHUNK)

    def error(a, b, k):
        timing = PrefillTiming(a, b, k)
        return sum((prefill_seconds(timing, p.tokens, chunk_tokens=CHUNK) / p.seconds - 1) ** 2 for p in points)

    best = error(found.a, found.b, found.k)
    for factor in (0.9, 1.1):
        assert best <= error(found.a * factor, found.b, found.k) + 1e-9
        assert best <= error(found.a, found.b * factor, found.k) + 1e-9
        assert best <= error(found.a, found.b, found.k * factor) + 1e-9


def test_measurements_that_tell_nothing_apart_are_refused():
    with pytest.raises(FitError, match="at least three lengths"):
        fit_prefill([PrefillPoint(64, 1.0), PrefillPoint(64, 1.1), PrefillPoint(128, 2.0)], chunk_tokens=CHUNK)
    with pytest.raises(FitError, match="two batches and two lengths"):
        fit_decode([DecodePoint(batch, 128 * batch, 0.1) for batch in (1, 2, 4, 8)])
    with pytest.raises(FitError, match="two batches and two lengths"):
        fit_decode([])


def answer(begin, gap, tokens, *, prompt=100):
    times = [begin + gap * index for index in range(tokens)]
    return Row(0, 0.0, prompt, tokens, times=times, prompt_tokens=prompt, completion_tokens=tokens)


def test_a_step_is_measured_while_all_answers_of_a_batch_are_generated():
    rows = [answer(1.0, 0.1, 20), answer(1.45, 0.1, 20)]
    point = steady(rows)
    assert point.batch == 2
    assert point.seconds == pytest.approx(0.1, rel=0.05)
    # In the middle of 1.45 to 2.9 s the first answer has about 12 tokens, and the second 7.
    assert point.kv_tokens == pytest.approx(200 + 12 + 7, abs=2)


def test_answers_one_after_the_other_are_no_batch():
    with pytest.raises(BenchError, match="hardly generated at the same time"):
        steady([answer(1.0, 0.1, 20), answer(4.0, 0.1, 20)])


async def test_an_endpoint_is_measured_into_a_file_that_simulations_take(tmp_path, capsys):
    file = tmp_path / "engine.json"
    async with Server().listening() as server:
        server.gap = 0.002
        settings = Settings(
            url=server.url, lengths="40,80,160", batches="1,3", answer_tokens=16, repeats=1, kv_tokens=5000, out=file,
            chunk_tokens=512,
        )  # fmt: skip
        status = await command.calibrate(settings, settings.plan())
    assert status == 0
    made = engine(str(file))
    assert (made.chunk_tokens, made.kv_tokens) == (512, 5000)
    # Each token takes 2 ms at least, whatever the batch.
    assert 0.002 <= made.timing.decode.seconds(1, 100) < 0.5
    notes = json.loads(file.read_text())["calibration"]
    assert [point["batch"] for point in notes["decode"]] == [1, 3, 1, 3]
    assert len(notes["prefill"]) == 3
    assert "off by" in capsys.readouterr().out


async def test_prefill_is_what_the_router_hears_of_the_instance_where_it_tells(tmp_path):
    file = tmp_path / "engine.json"
    async with Server().listening() as server:
        server.gap, server.stages = 0.002, {"queue": 0.5, "prefill": 7.5, "transfer": None}
        settings = Settings(url=server.url, lengths="40,80,160", batches="1,3", answer_tokens=16, repeats=1, out=file)
        assert await command.calibrate(settings, settings.plan()) == 0
    assert {point["seconds"] for point in json.loads(file.read_text())["calibration"]["prefill"]} == {7.5}


async def test_what_an_engine_cannot_do_is_told_and_the_rest_is_fitted(tmp_path, capsys):
    file = tmp_path / "engine.json"
    async with Server().listening() as server:
        server.gap = 0.002
        # The first request, four prompts of which the last is too long, and all that follows.
        server.script = ["ok"] * 3 + ["ok"] * 3 + ["400"] + ["ok"]
        settings = Settings(
            url=server.url, lengths="40,80,160,320", batches="1,3", answer_tokens=16, repeats=1, out=file
        )  # fmt: skip
        assert await command.calibrate(settings, settings.plan()) == 0
    assert "left out: prompts of 320: a request of 320 tokens failed: http_400: no room" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["calibration"]["prefill"]) == 3


async def test_an_engine_that_can_do_too_little_is_not_fitted():
    async with Server().listening() as server:
        server.gap = 0.002
        server.script = ["ok"] * 4 + ["503"]
        settings = Settings(url=server.url, lengths="40,80,160", batches="1,3", answer_tokens=16, repeats=1)
        with pytest.raises(FitError, match="at least three lengths"):
            await command.calibrate(settings, settings.plan())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "1,2"}, "at least three lengths"),
        ({"lengths": "1,2,x"}, "--lengths: '1,2,x' must be whole numbers"),
        ({"batches": "0,2"}, "--batches: '0,2' must be whole numbers from 1"),
        ({"batches": "2,2"}, "at least two"),
        ({"timeout": float("nan")}, "--timeout"),
        ({"out": "nowhere/x.json"}, "--out"),
    ],
)
def test_wrong_options_are_told(options, message, tmp_path):
    if "out" in options:
        options = {"out": tmp_path / options["out"]}
    with pytest.raises(OptionError, match=message):
        Settings(url="http://x", **options).plan()


def test_a_service_does_not_begin_with_an_engine_or_a_recording_that_cannot_be(tmp_path):
    service, taken = tmp_path / "service.yaml", tmp_path / "taken.jsonl"
    service.write_text(SERVICE)
    taken.write_text("precious")
    for arguments, message in (
        (("--engine", "qwen3-8b"), "--engine: there is no engine 'qwen3-8b'; did you mean qwen3-8b-h200?"),
        (("--record", str(taken)), "is there already; name a new file, or remove it"),
        (("--record", str(tmp_path / "no" / "x.jsonl")), "name a file in a folder that exists"),
    ):
        result = CliRunner().invoke(app, ["up", "-f", str(service), *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
    assert taken.read_text() == "precious"


@pytest.mark.parametrize("name", PRESETS)
def test_an_engine_is_read_back_as_it_was_written(name):
    assert parse_engine(json.dumps(document(PRESETS[name], calibration={"model": "x"}))) == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be an object"),
        ("{", "no JSON"),
        ("{}", "prefill: Field required"),
        ('{"prefill": {"a": 1, "b": 1, "k": -1}, "decode": {"a": 1, "b": 1, "c": 1}}', "k must be a finite number"),
        ('{"prefill": {"a": 1, "b": 1, "kk": 1}, "decode": {"a": 1, "b": 1, "c": 1}}', "did you mean prefill.k"),
        ('{"prefill": {"a": 1, "b": 1, "k": 1}, "decode": {"a": 1, "b": 1, "c": 1}, "kv": 1}', "kv: unknown; "),
        ('{"prefill": {"a": 1, "b": 1, "k": 1}, "decode": {"a": 1, "b": 1, "c": 1}, "kv_tokens": 0}', "kv_tokens"),
    ],
)
def test_a_wrong_engine_is_told_with_its_field(text, message):
    with pytest.raises(EngineError, match=message):
        parse_engine(text)
