"""One tokenizer for all processes of a server.

SGLang loads the same tokenizer four times, in three processes, and each load costs up to two seconds of a core. Loaded
once before the server forks, all of them have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaded: dict[str, Any] = {}


def shared_tokenizer(original: Callable[..., Any], path: str, *arguments: Any, **named: Any) -> Any:
    """The tokenizer that this process or its parent has loaded from the same place in the same way, else a new one."""
    key = repr((path, arguments, sorted(named.items())))
    if key not in _loaded:
        _loaded[key] = original(path, *arguments, **named)
    return _loaded[key]


def load_before_fork(server_arguments: Any) -> None:
    """Load the tokenizer as SGLang's processes will ask for it.

    Args:
        server_arguments: SGLang's `ServerArgs`; it fills in the tokenizer's path later.
    """
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer  # noqa: PLC0415

    if server_arguments.skip_tokenizer_init:
        return
    get_tokenizer(
        server_arguments.tokenizer_path or server_arguments.model_path,
        tokenizer_mode=server_arguments.tokenizer_mode,
        trust_remote_code=server_arguments.trust_remote_code,
        revision=server_arguments.revision,
        tokenizer_backend=server_arguments.tokenizer_backend,
    )
