"""Processes end with the one that started them."""

import subprocess
import sys

MIDDLE = """
import subprocess, sys, os
child = subprocess.Popen([sys.executable, "-c", '''
import sys, time
from kllm_core.lifetime import die_with_parent
die_with_parent(int(sys.argv[1]))
print("armed", flush=True)
time.sleep(600)
''', str(os.getpid())], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_is_killed_when_its_parent_is():
    # The grandchild keeps its stdout pipe open as long as it lives; here stderr is the one we share with it.
    middle = subprocess.Popen(
        [sys.executable, "-c", MIDDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert int(middle.stdout.readline()) > 0

    middle.kill()

    # End of file on the shared stderr: every process that held it is gone.
    assert middle.communicate(timeout=30)[1] == ""


def test_a_parent_that_is_already_gone_ends_the_child_at_once():
    program = "from kllm_core.lifetime import die_with_parent; die_with_parent(1); print('alive')"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == -9
    assert done.stdout == ""
