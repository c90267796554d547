"""A zygote whose servers do what their first argument says; run as `zygote_program.py SOCKET [HOLD_FILE]`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from kllm_engine.start.zygote import serve


class ScriptedRecipe:
    """Servers without an engine."""

    def prepare(self) -> None:
        """Take until the hold file is gone, as slow imports do."""
        hold = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        while hold is not None and hold.exists():
            time.sleep(0.01)

    def run(self, arguments: list[str]) -> None:
        """Exit with a code, raise, or live with a child of its own."""
        action, *rest = arguments
        if action == "exit":
            sys.exit(int(rest[0]))
        if action == "raise":
            raise RuntimeError(rest[0])
        if action == "environment":
            sys.stdout.write(os.environ[rest[0]] + "\n")
            sys.stdout.flush()
            subprocess.run(["sh", "-c", "echo from a child"], check=True)
            return
        pids = Path(rest[0])
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        partial = pids.with_suffix(".partial")
        partial.write_text(f"{os.getpid()} {child}")
        partial.rename(pids)
        time.sleep(600)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), ScriptedRecipe()))
