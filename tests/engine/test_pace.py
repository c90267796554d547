"""A pace is read as it was written, and what cannot be read is named."""

from __future__ import annotations

import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kllm_core.timing import DecodeTiming, PrefillTiming
from kllm_engine.pace import Pace, PaceError, parse_pace

PREFILL = PrefillTiming(0.02, 0.0005, 1e-8)
DECODE = DecodeTiming(0.03, 0.002, 1e-7)


@pytest.mark.parametrize(
    ("text", "pace"),
    [
        ("prefill=0.02+0.0005n+1e-8q,decode=0.03+0.002b+1e-7c", Pace(PREFILL, DECODE)),
        (" decode = 1e-7c + 0.03 + .002b , prefill = 1e-8q+0.0005n+0.02 ", Pace(PREFILL, DECODE)),
        ("decode=0.03", Pace(None, DecodeTiming(0.03, 0, 0))),
        ("prefill=2E-1n", Pace(PrefillTiming(0, 0.2, 0), None)),
        (json.dumps({"prefill": {"a": 0.02, "b": 0.0005, "k": 1e-8}}), Pace(PREFILL, None)),
        ('{"decode": {"b": 1}}', Pace(None, DecodeTiming(0, 1, 0))),
    ],
)
def test_a_pace_is_read(text, pace):
    assert parse_pace(text) == pace


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "prefill= or decode="),
        ("0.02", "'0.02' must begin with prefill= or decode="),
        ("prefil=0.02", "prefil=0.02"),
        ("prefill=", "prefill: '' is not a sum"),
        ("prefill=0.1+", "prefill: '0.1+' is not a sum"),
        ("prefill=fast", "prefill: 'fast' is not a sum"),
        ("prefill=-1", "prefill: '-1' is not a sum"),
        ("decode=0.1+2n", "decode: unknown unit 'n' in '2n'"),
        ("decode=0.1+0.2", "decode: two terms without a unit"),
        ("decode=1b+2b", "decode: two terms with b"),
        ("decode=1,decode=2", "decode is there twice"),
        ("decode=1e999", "decode: a must be a finite number"),
        ("{", "must be JSON"),
        ("{}", "needs prefill"),
        ('{"encode": {}}', "unknown part 'encode'"),
        ('{"decode": {"k": 1}}', "decode must be an object of a, b, c"),
        ('{"decode": {"a": "1"}}', "decode.a must be a number, got '1'"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(PaceError, match=re.escape(words)):
        parse_pace(text)


COEFFICIENT = st.floats(0, 1e3, allow_subnormal=False).map(lambda value: float(f"{value:g}"))


@given(st.tuples(*[COEFFICIENT] * 3), st.tuples(*[COEFFICIENT] * 3))
def test_a_written_pace_reads_back(prefill, decode):
    for pace in (
        Pace(PrefillTiming(*prefill), DecodeTiming(*decode)),
        Pace(None, DecodeTiming(*decode)),
        Pace(PrefillTiming(*prefill), None),
    ):
        assert parse_pace(str(pace)) == pace
