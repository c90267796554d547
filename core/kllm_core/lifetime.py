"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when its parent's starting thread ends.

    Args:
        parent_pid: the parent as the caller knows it. A parent that died before this call is noticed by it, and this
            process then ends at once.
        sig: SIGKILL also ends a process that is stopped or hung.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)
