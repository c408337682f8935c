"""A TCP proxy between a client and a real server, which can be slow, silent, cut off or busy.

It runs on threads of its own, so that a blocked test cannot stop it.
"""

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

CHUNK = 1 << 16
CONDITION = re.compile(rb"if-none-match:", re.IGNORECASE)
BUSY = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Weather:
    """What happens to connections: probabilities per connection or chunk, seconds, and bytes per second.

    ``busy`` answers 503, on connections that are open already too.

    ``unconditional`` takes the condition off every create, as a gateway that does not know it would.
    """

    latency: float = 0.0
    bandwidth: float | None = None
    refuse: float = 0.0
    busy: float = 0.0
    cut: float = 0.0
    cut_answer: float = 0.0
    silent: bool = False
    unconditional: bool = False


class Proxy:
    """Forwards ``url`` to ``target`` through ``weather``, which may be changed at any time."""

    def __init__(self, target: str, seed: int = 0) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.weather = Weather()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._chance(self.weather.refuse):
            return _reset(client)
        if self._chance(self.weather.busy):
            with contextlib.suppress(OSError):
                client.recv(CHUNK)
                client.sendall(BUSY)
            return client.close()
        with contextlib.suppress(OSError):
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            self._pump(server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        """Carry bytes one way until an end closes; ``answers`` is the way back to the client."""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                weather = self.weather
                time.sleep(weather.latency + (len(data) / weather.bandwidth if weather.bandwidth else 0.0))
                while self.weather.silent:
                    time.sleep(0.01)
                if weather.unconditional and not answers:
                    data = CONDITION.sub(b"x-none-match-:", data)
                if not answers and self._chance(weather.busy):
                    source.sendall(BUSY)
                    break
                if self._chance(weather.cut_answer if answers else weather.cut):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):  # wakes the other way's thread, which close alone does not
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability


def _reset(connection: socket.socket) -> None:
    """Close with a RST instead of a FIN."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


@contextlib.contextmanager
def proxied(target: str, seed: int = 0) -> Iterator[Proxy]:
    """A proxy in front of ``target`` for the context."""
    proxy = Proxy(target, seed)
    try:
        yield proxy
    finally:
        proxy.close()
