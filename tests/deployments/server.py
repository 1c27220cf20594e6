"""An application behind a real socket, in a thread."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI


class Server:
    """Where an application listens, and the event loop that it runs on."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.loop = asyncio.new_event_loop()

    def wait(self, event: asyncio.Event) -> None:
        """Wait for an event of the application. Raises TimeoutError when it does not come."""
        asyncio.run_coroutine_threadsafe(event.wait(), self.loop).result(timeout=30)

    def set(self, event: asyncio.Event) -> None:
        self.loop.call_soon_threadsafe(event.set)

    def post(self, path: str, body: bytes) -> socket.socket:
        """Send a request on a connection of its own, of which the caller may do as it likes."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener.getsockname()[1])
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        http = uvicorn.Server(config)

        def run() -> None:
            with contextlib.closing(server.loop):
                server.loop.run_until_complete(http.serve(sockets=[listener]))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server
        finally:
            http.should_exit = True
            thread.join()
