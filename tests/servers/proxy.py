"""A TCP proxy that can be severed, as a network that drops packets, or closed, as a server that was stopped."""

import select
import socket
import threading

from ports import free_port

CHUNK_BYTES = 64 << 10


class Proxy:
    """Listens on a port of this machine. With `http1_only`, severing concerns connections of HTTP/1.1 only: workers read
    blocks over it, and frontends speak HTTP/2."""

    def __init__(self, target_port, http1_only=False):
        self.target_port, self.http1_only = target_port, http1_only
        self.passing, self.closed = threading.Event(), threading.Event()
        self.passing.set()
        self.port = free_port()
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self.accept, daemon=True).start()

    def sever(self):
        self.passing.clear()

    def close(self):
        self.closed.set()

    def heal(self):
        self.closed.clear()
        self.passing.set()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client:
            first = client.recv(3, socket.MSG_PEEK)
            concerned = not (self.http1_only and first == b"PRI")
            if self.closed.is_set() or not first:
                return
            if concerned:
                self.passing.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                return
            with server:
                self.copy(client, server, concerned)

    def copy(self, client, server, concerned):
        while not (concerned and self.closed.is_set()):
            ready, _, _ = select.select([client, server], [], [], 0.2)
            for source in ready:
                try:
                    data = source.recv(CHUNK_BYTES)
                    if concerned:
                        self.passing.wait()
                    if not data:
                        return
                    (server if source is client else client).sendall(data)
                except OSError:
                    return
