"""A zygote whose engines have gates; run as `gated_zygote.py SOCKET PARENT_PID`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from faults import gates

from kllm_core.lifetime import die_with_parent
from kllm_core.logs import configure_logs
from kllm_engine.start.recipe import SglangRecipe
from kllm_engine.start.zygote import serve


class GatedRecipe(SglangRecipe):
    """SGLang's servers as kLLM runs them, with gates on top of kLLM's own hooks."""

    def prepare(self) -> None:
        """Import, hook and gate."""
        super().prepare()
        gates.install()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    configure_logs()
    code = serve(Path(sys.argv[1]), GatedRecipe())
    sys.stdout.flush()
    os._exit(code)
