"""`hf://ORG/NAME[@REVISION]`: a snapshot of a model repository."""

from __future__ import annotations

import os
from pathlib import Path

from kllm_engine.models.exceptions import ModelUnavailableError
from kllm_engine.models.store import Progress

_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def fetch(repository: str, revision: str | None, *, cache_dir: Path, progress: Progress) -> Path:
    """Download what SGLang loads, or use what was downloaded before; HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        ModelUnavailableError: it is not in the cache and cannot be downloaded; the message says why.
    """
    # Read at import time; a server's environment says offline, a download must not.
    offline = os.environ.get("HF_HUB_OFFLINE", "") in {"1", "true", "yes", "on"}
    from huggingface_hub import snapshot_download  # noqa: PLC0415  takes a second, and only this needs it
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"hf://{repository}" + (f"@{revision}" if revision else "")
    progress(f"{name}: looking for it" + (" in the cache (HF_HUB_OFFLINE is set)" if offline else ""))
    try:
        path = snapshot_download(
            repository, revision=revision, cache_dir=cache_dir, allow_patterns=_PATTERNS, local_files_only=offline
        )
    except GatedRepoError as error:
        raise ModelUnavailableError(f"{name} is gated: accept its terms and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelUnavailableError(f"{name}: there is no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailableError(f"{name} does not exist, or needs HF_TOKEN to be seen") from error
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub could not be reached (check HF_ENDPOINT and network)"
        raise ModelUnavailableError(f"{name} is not in the cache {cache_dir}, and {reason}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelUnavailableError(f"{name} could not be downloaded: {error}") from error
    return Path(path)
