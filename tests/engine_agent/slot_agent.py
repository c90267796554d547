"""`kllm-engine` whose own zygotes fork fake engines."""

from __future__ import annotations

import sys
from pathlib import Path

from kllm_engine.agent import command, zygote_child
from kllm_engine.main import main

if __name__ == "__main__":
    # Their arguments are none of SGLang's.
    command.unknown_arguments = lambda names: []
    zygote_child.PROGRAM = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
    main()
