"""Which arguments SGLang has, told without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

_DECLARED_IN = ("srt/server_args.py", "srt/arg_groups")
"""Where SGLang declares its arguments, as flags or as fields that flags are named after."""
_WORD = re.compile(r"[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*")


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Those names, without leading dashes, that no argument of the installed SGLang can have.

    A name passes if it is anywhere in the declarations, so that what passes may still be refused by SGLang; none that
    it has is told here. Without SGLang none is.
    """
    wanted = sorted(set(names))
    if not wanted:
        return []
    words = _words()
    return [name for name in wanted if words and not _is_known(name, words)]


def _is_known(name: str, words: set[str]) -> bool:
    # argparse makes the negation of a switch by itself.
    spellings = {name, name.removeprefix("no-")}
    return any(each in words or each.replace("-", "_") in words for each in spellings)


def _words() -> set[str]:
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return set()
    root = Path(package.submodule_search_locations[0])
    files = [each for part in _DECLARED_IN for each in _modules(root / part)]
    return {word for each in files for word in _WORD.findall(each.read_text(encoding="utf-8"))}


def _modules(path: Path) -> Iterable[Path]:
    return path.rglob("*.py") if path.is_dir() else [path] if path.is_file() else []
