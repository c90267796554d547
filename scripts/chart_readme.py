"""The table of values in the chart's README: `python scripts/chart_readme.py CHART`. `make generate` writes it."""  # noqa: INP001

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):")
_TEXT = re.compile(r"^ *# (?P<dashes>-- )?(?P<text>.*)$")


def described(text: str) -> Iterator[tuple[str, Any, str]]:
    """Path, default and description of each value of a values.yaml that has one, in the file's order."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        comment = _TEXT.match(line)
        if comment:
            words = [comment["text"]] if comment["dashes"] else [*words, comment["text"]]
            continue
        key = _KEY.match(line)
        if key:
            indent = len(key["indent"])
            path = [*((i, name) for i, name in path if i < indent), (indent, key["key"])]
            if words:
                names = [name for _, name in path]
                yield ".".join(names), _at(values, names), " ".join(words)
        words = []


def table(text: str) -> str:
    """The same in Markdown."""
    rows = "".join(
        f"| `{path}` | `{json.dumps(default)}` | {words.replace('|', chr(92) + '|')} |\n"
        for path, default, words in described(text)
    )
    return f"| value | default | what |\n|---|---|---|\n{rows}"


def with_table(readme: str, values: str) -> str:
    """The README with its table made again."""
    before, rest = readme.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{table(values)}{_END}{after}"


def _at(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[name]
    return values


if __name__ == "__main__":
    chart = Path(sys.argv[1])
    readme = chart / "README.md"
    readme.write_text(
        with_table(readme.read_text(encoding="utf-8"), (chart / "values.yaml").read_text(encoding="utf-8")),
        encoding="utf-8",
    )
