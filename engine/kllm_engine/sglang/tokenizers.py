"""One tokenizer for all processes of a server.

SGLang loads the same tokenizer four times, in three processes, and each load costs up to two seconds of a core. Loaded
once before the server forks, all of them have it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_loaded: dict[str, Any] = {}


def shared_tokenizer(original: Callable[..., Any], path: str, *arguments: Any, **named: Any) -> Any:
    """The tokenizer that this process or its parent has loaded from the same place in the same way, else a new one."""
    key = repr((path, arguments, sorted(named.items())))
    if key not in _loaded:
        _loaded[key] = original(path, *arguments, **named)
    return _loaded[key]


def load_before_fork(path: str, server_arguments: Any) -> None:
    """Load a tokenizer as SGLang's processes will ask for it.

    Args:
        path: of the tokenizer, which SGLang fills in later where it is the model's.
        server_arguments: SGLang's `ServerArgs`, or that class for its defaults.
    """
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer  # noqa: PLC0415

    if server_arguments.skip_tokenizer_init:
        return
    get_tokenizer(
        path,
        tokenizer_mode=server_arguments.tokenizer_mode,
        trust_remote_code=server_arguments.trust_remote_code,
        revision=server_arguments.revision,
        tokenizer_backend=server_arguments.tokenizer_backend,
    )


def try_to_load(path: str, server_arguments: Any) -> None:
    """As `load_before_fork`; a tokenizer that cannot be loaded is left to the server, whose log then says why."""
    try:
        load_before_fork(path, server_arguments)
    except Exception as error:  # noqa: BLE001  whatever transformers and a model's files may raise
        _log.warning("the tokenizer of %s was not loaded beforehand: %s", path, error)
