"""Ports for servers that the tests start."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at, each another."""
    with contextlib.ExitStack() as sockets:
        taken = [sockets.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]
