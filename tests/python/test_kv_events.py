"""KV events against libzmq: the example `follow_kv_events` of the crate `upstream`, and publishers made with pyzmq.

A publisher speaks as vLLM's does: PUB with sequence numbers, and a ROUTER that replays its buffer.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time

import zmq
from process import binary, free_port

TIMEOUT = 30


def payload(block, size=0):
    """A batch in the array encoding: [1, [["BlockStored", [block], nil, [], 0, nil, padding]]]."""
    out = b"\x92\x01\x91\x97\xabBlockStored\x91\xcf" + block.to_bytes(8, "big")
    return out + b"\xc0\x90\x00\xc0\xda" + size.to_bytes(2, "big") + b"x" * size


def publisher(live, replay, first, commands, hwm, buffered):
    """Publishes batches with the blocks first, first + 1, ... as the parent commands."""
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.setsockopt(zmq.SNDHWM, hwm)
    pub.bind(f"tcp://127.0.0.1:{live}")
    router = context.socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{replay}")
    number, buffer = 0, []
    while True:
        if commands.poll(0.005):
            count, send, size = commands.recv()
            for _ in range(count):
                frames = [b"kv", number.to_bytes(8, "big"), payload(first + number, size)]
                buffer = (buffer + [frames])[-buffered:]
                if send:
                    pub.send_multipart(frames)
                number += 1
            commands.send(number)
        if router.poll(0):
            identity, empty, start = router.recv_multipart()
            assert empty == b"" and len(start) == 8
            for frames in buffer:
                if frames[1] >= start:
                    router.send_multipart([identity, b"", *frames])
            router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])


class Publisher:
    """A publisher in a process of its own."""

    def __init__(self, live, replay, first=0, hwm=100_000, buffered=10_000):
        self.commands, theirs = multiprocessing.Pipe()
        arguments = (live, replay, first, theirs, hwm, buffered)
        self.process = multiprocessing.Process(target=publisher, args=arguments, daemon=True)
        self.process.start()

    def publish(self, count, send=True, size=0):
        """Publishes `count` batches; without `send` they are lost on the way."""
        self.commands.send((count, send, size))
        return self.commands.recv()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Follower:
    """The process under test, and the lines that it printed."""

    def __init__(self, live, replay="-", delay=0):
        endpoint = f"tcp://127.0.0.1:{replay}" if replay != "-" else "-"
        follower = binary().parent / "examples" / "follow_kv_events"
        arguments = [follower, f"tcp://127.0.0.1:{live}", endpoint, "kv", str(delay)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.lines = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        self.lines.extend(line.strip() for line in self.process.stdout)

    def wait(self, line, seconds=TIMEOUT):
        end = time.monotonic() + seconds
        while line not in self.lines:
            assert time.monotonic() < end, f"no {line!r}, but {self.lines[-20:]}"
            assert self.process.poll() is None, "the follower ended"
            time.sleep(0.01)

    def blocks(self):
        return [int(line.split()[1]) for line in self.lines if line.startswith("batch ")]

    def rss(self):
        """Resident memory in MiB, at its peak."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

    def close(self):
        self.process.kill()
        self.process.wait()


def runs(numbers):
    """Runs of consecutive numbers, for messages."""
    starts = [at for at, number in enumerate(numbers) if at == 0 or number != numbers[at - 1] + 1]
    return [(numbers[a], numbers[b - 1]) for a, b in zip(starts, starts[1:] + [len(numbers)])]


def ports(count=2):
    """Different free ports."""
    found = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def test_a_late_subscriber_gets_all():
    live, replay = ports()
    publisher = Publisher(live, replay)
    publisher.publish(50)
    follower = Follower(live, replay)
    follower.wait("batch 49")
    publisher.publish(50)
    follower.wait("batch 99")
    assert follower.blocks() == list(range(100))
    assert "stale" not in follower.lines and "new epoch" not in follower.lines
    follower.close()
    publisher.kill()


def test_lost_batches_are_replayed():
    live, replay = ports()
    publisher = Publisher(live, replay)
    follower = Follower(live, replay)
    follower.wait("connected")
    publisher.publish(1)
    follower.wait("batch 0")
    for _ in range(5):
        publisher.publish(20, send=False)
        publisher.publish(20)
    follower.wait("batch 200")
    assert follower.blocks() == list(range(201))
    assert "stale" not in follower.lines
    follower.close()
    publisher.kill()


def test_a_killed_publisher_is_followed_again():
    live, replay = ports()
    publisher = Publisher(live, replay)
    follower = Follower(live, replay)
    publisher.publish(10)
    follower.wait("batch 9")
    for epoch in range(1, 4):
        follower.lines.clear()
        publisher.kill()
        follower.wait("disconnected")
        publisher = Publisher(live, replay, first=1000 * epoch)
        # More than before, and before the follower is back.
        publisher.publish(20 * epoch)
        follower.wait(f"batch {1000 * epoch + 20 * epoch - 1}")
        publisher.publish(1)
        follower.wait(f"batch {1000 * epoch + 20 * epoch}")
        assert follower.lines.count("new epoch") == 1, follower.lines
        assert follower.blocks() == list(range(1000 * epoch, 1000 * epoch + 20 * epoch + 1))
        assert "stale" not in follower.lines
    follower.close()
    publisher.kill()


def test_a_stopped_follower_never_blocks_the_publisher():
    live, replay = ports()
    publisher = Publisher(live, replay, hwm=100, buffered=500)
    follower = Follower(live, replay)
    publisher.publish(1)
    follower.wait("batch 0")
    os.kill(follower.process.pid, signal.SIGSTOP)
    # 200 MB, more than the buffers of the kernel and of libzmq hold.
    publisher.publish(5000, size=40_000)
    os.kill(follower.process.pid, signal.SIGCONT)
    time.sleep(1)
    publisher.publish(1)
    follower.wait("batch 5001")
    blocks = follower.blocks()
    assert blocks == sorted(set(blocks)), "each batch once, in order"
    assert blocks[-500:] == list(range(4502, 5002)), f"the buffered batches were replayed: {runs(blocks)}"
    assert "stale" in follower.lines, "the others are lost for good"
    assert follower.rss() < 150
    follower.close()
    publisher.kill()


def test_a_slow_follower_keeps_up_by_replay():
    live, replay = ports()
    publisher = Publisher(live, replay, hwm=50)
    follower = Follower(live, replay, delay=2)
    follower.wait("connected")
    publisher.publish(1)
    follower.wait("batch 0")
    last = publisher.publish(1000, size=40_000) - 1
    end = time.monotonic() + TIMEOUT
    while f"batch {last}" not in follower.lines and time.monotonic() < end:
        # The last batches may be lost too; the next one that arrives shows it.
        last = publisher.publish(1) - 1
        time.sleep(0.5)
    assert follower.blocks() == list(range(last + 1))
    assert "stale" not in follower.lines
    follower.close()
    publisher.kill()


def test_hostile_peers_take_no_memory():
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
    ready = b"\x04" + bytes([len(ready) - 2]) + ready[2:]
    hostile = [
        os.urandom(4096),
        b"HTTP/1.1 200 OK\r\n\r\n",
        greeting + ready + b"\x02" + (1 << 40).to_bytes(8, "big"),
        greeting + ready + b"\x02" + ((1 << 64) - 1).to_bytes(8, "big"),
        greeting + ready + b"\x02" + (15 << 20).to_bytes(8, "big"),
        greeting + ready + b"\x01\x00" * 1000,
        greeting + ready + b"\x06" + (1 << 30).to_bytes(8, "big"),
    ]
    (live,) = ports(1)
    with socket.create_server(("127.0.0.1", live)) as listener:
        follower = Follower(live)
        for data in hostile:
            peer, _ = listener.accept()
            peer.settimeout(1)
            try:
                peer.sendall(data)
                for _ in range(64):
                    peer.sendall(bytes(1 << 20))
            except OSError:
                pass
            peer.close()
    assert follower.rss() < 60
    publisher = Publisher(live, ports(1)[0])
    end = time.monotonic() + TIMEOUT
    while not follower.blocks() and time.monotonic() < end:
        publisher.publish(1)
        time.sleep(0.1)
    assert follower.blocks(), "connected again to a real publisher"
    follower.close()
    publisher.kill()


def test_idle_connections_stay_open():
    live, replay = ports()
    publisher = Publisher(live, replay)
    follower = Follower(live, replay)
    follower.wait("connected")
    # It may have begun before the publisher.
    follower.lines.clear()
    # Longer than the follower's limit for silence: libzmq answers its heartbeats.
    time.sleep(35)
    assert "disconnected" not in follower.lines
    publisher.publish(1)
    follower.wait("batch 0")
    follower.close()
    publisher.kill()
