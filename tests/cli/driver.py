"""The command line with small programs in place of the engine and the router."""

from __future__ import annotations

import sys
from pathlib import Path

FAKE = str(Path(__file__).parent.parent / "substrate" / "fake_program.py")


def main() -> None:
    """Run `kllm`."""
    from kllm_operator.substrate import programs

    programs._module = lambda name: (sys.executable, FAKE, name)
    from kllm.main import main as kllm

    kllm()


if __name__ == "__main__":
    main()
