"""`kllm status`, `kllm chat` and `kllm demo` against a small router."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from cli.cli_helpers import DRIVER, Machine
from substrate.substrate_helpers import wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A machine on which one service is up."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    with machine.up(STUB_FOLDER=str(machine.folder)) as up:
        up.wait_for("serving")
        wait_until(lambda: machine.pool("decode").get("load", {}).get("value") == 0, what="a first look at the loads")
        yield machine
        up.signal(signal.SIGTERM)
        assert up.end()[0] == 0
    machine.close()


@pytest.fixture
def idle(tmp_path):
    """A machine on which nothing is up."""
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_status_shows_each_instance_with_its_load(served):
    result = served.kllm("status")
    assert result.returncode == 0
    line = next(line for line in result.stdout.splitlines() if "chat-prefill-0" in line)
    assert re.search(r"chat-prefill-0 +prefill +Serving +1 +2 +3 +25% +\d+ +\d+", line)


def test_status_shows_each_pool_with_its_load_and_counts(served):
    lines = served.kllm("status").stdout.splitlines()
    assert any(re.search(r"^prefill +QueueAndPrefill +0\.00 +0\.00 +- +1 +1 +0 +0$", line) for line in lines), lines


def test_status_shows_how_engines_are_paced(served):
    rows = {row["id"]: row for row in json.loads(served.kllm("status", "--json").stdout)}
    assert rows["chat-prefill-0"]["pacing"] == "prefill=1+0n+0q"
    assert rows["router-0"]["pools"]["decode"]["ready"] == 1
    assert "PACING" in served.kllm("status").stdout


def test_status_can_be_watched_until_ctrl_c(served):
    command = [sys.executable, DRIVER, "status", "--watch"]
    with subprocess.Popen(command, env=served.environment, stdout=subprocess.PIPE, text=True) as watching:
        shown = ""
        while shown.count("zygote") < 2:
            shown += watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
    assert watching.returncode == 0
    assert "\x1b" not in shown, "codes of a terminal are for terminals"


def test_status_as_json_has_all_processes(served):
    rows = {row["id"]: row for row in json.loads(served.kllm("status", "chat", "--json").stdout)}
    assert rows.keys() == {"chat-prefill-0", "chat-decode-0", "router-0", "zygote"}
    assert rows["chat-prefill-0"]["kv_used_share"] == 0.25
    assert rows["router-0"]["address"].startswith("http://127.0.0.1:")
    assert all(row["pss_bytes"] > 1_000_000 for row in rows.values())


def test_status_of_another_service_names_those_that_are_up(served):
    result = served.kllm("status", "other")
    assert result.returncode == 2
    assert "service 'other' is not up on this machine (up: chat)" in result.stderr


def test_status_with_nothing_up_says_how_to_start(idle):
    result = idle.kllm("status")
    assert (result.returncode, result.stdout) == (2, "")
    assert "nothing is up on this machine; start it with: kllm up -f FILE" in result.stderr
    assert idle.kllm("status", "--json").stdout == "[]\n"


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--system", "Be brief.", "--temperature", "0"]])
def test_chat_prints_the_answer_and_nothing_else(served, options):
    result = served.kllm("chat", "What is the capital of France?", *options)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Paris is the capital.\n", "")


def test_chat_reads_standard_input(served):
    assert served.kllm("chat", "-", text="What?").stdout == "Paris is the capital.\n"


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_chat_tells_the_routers_error_plainly(served, options):
    result = served.kllm("chat", "hello", "--model", "other", *options)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "kllm: no model other\n")


def test_bench_measures_the_service_that_is_up(served):
    result = served.kllm("bench", "--rate", "5", "--duration", "1", "--arrivals", "constant", "--osl", "5")
    rows = {row["id"]: row for row in json.loads(served.kllm("status", "--json").stdout)}
    assert result.returncode == 0, result.stderr
    assert f"smollm2 at {rows['router-0']['address']} (completions)" in result.stdout


def test_chat_with_nothing_up_says_so(idle):
    result = idle.kllm("chat", "hello")
    assert result.returncode == 2
    assert "nothing is up on this machine" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ftp://127.0.0.1"])
def test_chat_with_an_address_that_does_not_answer_fails_plainly(idle, url):
    result = idle.kllm("chat", "hello", "--url", url)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("kllm: ")
    assert "Traceback" not in result.stderr


def test_demo_streams_an_answer_and_ends_with_its_figures(idle):
    began = time.time() - 100
    result = idle.kllm("demo", "-f", str(idle.manifest), KLLM_DEMO_STARTED=f"{began}")
    assert result.returncode == 0
    *_, last = result.stdout.splitlines()
    assert "Paris is the capital." in result.stdout
    figures = re.fullmatch(
        r"demo: ttft_ms=\d+ tpot_ms=\d+\.\d prefill=chat-prefill-0 decode=chat-decode-0 binding=late elapsed_s=(.*)",
        last,
    )
    assert figures is not None, last
    assert float(figures[1]) > 100


def test_demo_runs_beside_a_service_of_the_same_name(served):
    assert served.kllm("demo", "-f", str(served.manifest)).returncode == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"FAKE_SILENT": "1"}, "the answer was empty"), ({"FAKE_FAIL": "router"}, "router-0 failed: out of luck")],
)
def test_demo_fails_without_an_answer(idle, variables, message):
    result = idle.kllm("demo", "-f", str(idle.manifest), **variables)
    assert result.returncode == 1
    assert message in result.stderr
    assert "demo:" not in result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from kllm.main import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    for name in ("torch", "sglang", "grpc", "pydantic", "httpx2", "openai", "psutil", "kllm_operator"):
        assert f"'{name}'" not in loaded


def test_version_is_that_of_the_package(idle):
    assert re.fullmatch(r"kllm \d+\.\d+\.\d+\n", idle.kllm("--version").stdout)
