"""`hf://ORG/NAME[@REVISION]`: a snapshot of a model repository."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kllm_core.models.exceptions import (
    AccessDeniedError,
    DiskFullError,
    HubUnreachableError,
    ModelError,
    ModelNotFoundError,
    WrongAddressError,
)

SCHEME = "hf://"


def fetch(
    repository: str,
    *,
    cache_dir: Path,
    patterns: Sequence[str],
    progress: Callable[[str], None],
) -> Path:
    """Download files of a repository, or use what was downloaded before; HF_ENDPOINT and HF_TOKEN are honoured.

    Args:
        repository: ORG/NAME[@REVISION].
        cache_dir: where downloads are kept.
        patterns: names of the files that are needed, with wildcards.
        progress: told what takes time, for people.

    Raises:
        ModelError: they are not in the cache and cannot be downloaded; the message says why.
    """
    # Read at import time; a server's environment says offline, a download must not.
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    # These take a second, and only this needs them.
    from httpx import HTTPError  # noqa: PLC0415
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        XetDownloadError,
    )

    address = f"{SCHEME}{repository}"
    wrong = f"{address} is no address of a model repository: use {SCHEME}ORG/NAME[@REVISION]"
    name, _, revision = repository.partition("@")
    if name.count("/") != 1:
        raise WrongAddressError(wrong)
    progress(f"{address}: looking for it" + (" in the cache (HF_HUB_OFFLINE is set)" if offline else ""))
    _bound_calls()
    try:
        path = snapshot_download(
            name,
            revision=revision or None,
            cache_dir=cache_dir,
            allow_patterns=list(patterns),
            local_files_only=offline,
        )
    except HFValidationError as error:
        raise WrongAddressError(wrong) from error
    except GatedRepoError as error:
        raise AccessDeniedError(f"{address} is gated: accept its terms and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{address}: there is no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{address} does not exist, or needs HF_TOKEN to be seen") from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise HubUnreachableError(
                f"{address} is not in the cache {cache_dir}, and HF_HUB_OFFLINE is set"
            ) from error
        raise _refused(address, error.__cause__ or error) from error
    except (HTTPError, OSError, XetDownloadError) as error:
        raise _refused(address, error) from error
    return Path(path)


def _bound_calls() -> None:
    """Some calls of the library have no timeout: a hub that is silent would be waited for as long as it likes."""
    import httpx  # noqa: PLC0415
    from huggingface_hub import constants, set_client_factory  # noqa: PLC0415

    def bounded(request: httpx.Request) -> None:
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            phase: given.get(phase) or constants.HF_HUB_ETAG_TIMEOUT for phase in ("connect", "read", "write", "pool")
        }

    set_client_factory(lambda: httpx.Client(event_hooks={"request": [bounded]}, follow_redirects=True))


def _refused(address: str, error: BaseException) -> ModelError:
    """What a failed call or write comes to."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFullError(
            f"{address} has no room in its cache: {error.strerror}; free some space or choose another --cache"
        )
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ModelError(f"{address} cannot be written to its cache: {error}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403}:
        return AccessDeniedError(f"{address}: the hub answered {status}: check HF_TOKEN and its rights")
    if status == 404:
        return ModelNotFoundError(f"{address} does not exist at this hub (HF_ENDPOINT)")
    reason = f"the hub answered {status}" if status else (str(error).partition("\n")[0] or type(error).__name__)
    return HubUnreachableError(f"{address} could not be downloaded: {reason} (check HF_ENDPOINT and the network)")
