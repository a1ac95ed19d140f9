"""Ports for the servers of tests and benchmarks."""

import random
import socket

# Below the ports that systems give to outgoing connections (from 32768 on Linux): one of those could take the port
# before its server has started, or while it is restarted.
SERVER_PORTS = range(15_000, 32_000)


def free_port():
    """A port for a server, drawn at random so that runs beside each other rarely draw the same."""
    while True:
        port = random.choice(SERVER_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
