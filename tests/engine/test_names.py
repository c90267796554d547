"""Names of SGLang's arguments, without SGLang being imported."""

import argparse
import sys

import pytest

from kllm_engine.sglang.names import unknown_arguments


def test_what_sglang_does_not_have_is_told():
    names = ["page-size", "no-such-argument", "attention-backend", "paged-size", "disable-radix-cache"]
    assert unknown_arguments(names) == ["no-such-argument", "paged-size"]


def test_nothing_that_sglang_has_is_told():
    sglang = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    sglang.ServerArgs.add_cli_args(parser)
    flags = {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}
    assert len(flags) > 100
    assert unknown_arguments(flags - {"h", "-h", "help"}) == []


def test_without_sglang_nothing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert unknown_arguments(["no-such-argument"]) == []
