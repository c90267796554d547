"""Forked processes that must not outlive the process that forked them."""

from __future__ import annotations

import ctypes
import os

from kllm_core.lifetime import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_forking_pid = os.getpid()
_registered = False


def _remember_parent() -> None:
    global _forking_pid  # noqa: PLW0603  the hooks of os.register_at_fork take no argument
    _forking_pid = os.getpid()


def _follow_parent() -> None:
    die_with_parent(_forking_pid)


def follow_parent_in_every_fork() -> None:
    """From now on every os.fork below this process gets SIGKILL when its parent's forking thread ends.

    Children inherit the hooks, so that a whole tree falls when its root does, however the root died.
    """
    global _registered  # noqa: PLW0603  hooks cannot be unregistered, so they are registered once per process
    if not _registered:
        os.register_at_fork(before=_remember_parent, after_in_child=_follow_parent)
        _registered = True


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent ends: not every container's process 1 reaps them.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")
