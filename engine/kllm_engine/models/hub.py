"""`hf://ORG/NAME[@REVISION]`: a snapshot of a model repository."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kllm_engine.models.exceptions import (
    AccessDeniedError,
    DiskFullError,
    HubUnreachableError,
    ModelError,
    ModelNotFoundError,
    WrongAddressError,
)
from kllm_engine.models.store import Progress

_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def fetch(repository: str, revision: str | None, *, cache_dir: Path, progress: Progress) -> Path:
    """Download what SGLang loads, or use what was downloaded before; HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        ModelError: it is not in the cache and cannot be downloaded; the message says why.
    """
    # Read at import time; a server's environment says offline, a download must not.
    offline = os.environ.get("HF_HUB_OFFLINE", "") in {"1", "true", "yes", "on"}
    # These take a second, and only this needs them.
    import httpx  # noqa: PLC0415
    from huggingface_hub import constants, set_client_factory, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        XetDownloadError,
    )

    def bounded(request: httpx.Request) -> None:
        """Some calls of the library have no timeout: a hub that is silent would be waited for as long as it likes."""
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            phase: given.get(phase) or constants.HF_HUB_ETAG_TIMEOUT for phase in ("connect", "read", "write", "pool")
        }

    set_client_factory(lambda: httpx.Client(event_hooks={"request": [bounded]}, follow_redirects=True))
    name = f"hf://{repository}" + (f"@{revision}" if revision else "")
    progress(f"{name}: looking for it" + (" in the cache (HF_HUB_OFFLINE is set)" if offline else ""))
    try:
        path = snapshot_download(
            repository, revision=revision, cache_dir=cache_dir, allow_patterns=_PATTERNS, local_files_only=offline
        )
    except HFValidationError as error:
        raise WrongAddressError(f"{name} is no address of a model repository: use hf://ORG/NAME[@REVISION]") from error
    except GatedRepoError as error:
        raise AccessDeniedError(f"{name} is gated: accept its terms and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name}: there is no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{name} does not exist, or needs HF_TOKEN to be seen") from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise HubUnreachableError(f"{name} is not in the cache {cache_dir}, and HF_HUB_OFFLINE is set") from error
        raise _refused(name, error.__cause__ or error) from error
    except (httpx.HTTPError, OSError, XetDownloadError) as error:
        raise _refused(name, error) from error
    return Path(path)


def _refused(name: str, error: BaseException) -> ModelError:
    """What a failed call or write comes to."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFullError(
            f"{name} has no room in its cache: {error.strerror}; free some space or choose another --cache"
        )
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ModelError(f"{name} cannot be written to its cache: {error}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403}:
        return AccessDeniedError(f"{name}: the hub answered {status}: check HF_TOKEN and its rights")
    if status == 404:
        return ModelNotFoundError(f"{name} does not exist at this hub (HF_ENDPOINT)")
    reason = f"the hub answered {status}" if status else (str(error).partition("\n")[0] or type(error).__name__)
    return HubUnreachableError(f"{name} could not be downloaded: {reason} (check HF_ENDPOINT and the network)")
