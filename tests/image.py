"""The container image as its users start it: without rights, with a read-only root, stopped with SIGTERM.

    image.py RUNTIME IMAGE

RUNTIME: docker or podman. `make test-image` builds the image first. Exits with 1 and the reason if a check fails.
"""

import json
import subprocess
import sys
import time
import urllib.request

MAX_START_SECONDS = 120
# Longer than the default of `shutdown_timeout`.
STOP_SECONDS = 40


def run(*command, check=True):
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode != 0:
        sys.exit(f"image: {' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def require(condition, what):
    if not condition:
        sys.exit(f"image: it does not hold that {what}")
    print(f"  {what}", flush=True)


def until_ready(url, log):
    deadline = time.monotonic() + MAX_START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"image: it is not ready after {MAX_START_SECONDS} s:\n{log()}")


def main(runtime, image):
    rights = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    container = run(runtime, "run", "--detach", *rights, "--publish", "127.0.0.1::8000", image).stdout.split()[-1]
    logged = lambda: run(runtime, "logs", container)
    log = lambda: logged().stdout + logged().stderr
    try:
        address = run(runtime, "port", container, "8000").stdout.split()[-1]
        url = f"http://{address}"
        until_ready(url, log)
        require("every machine that reaches this address can use the API" in log(), "it warns that it asks for no key")
        body = {"model": "small", "prompt": "hello", "max_tokens": 3}
        request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            usage = json.loads(response.read())["usage"]
        require(usage["completion_tokens"] > 0, "it answers a request")
        doctor = run(runtime, "exec", container, "blockyard", "doctor")
        require(" 0 problems" in doctor.stdout, "`blockyard doctor` in it finds no problem")
        require(run(runtime, "exec", container, "sh", check=False).returncode != 0, "it has no shell")
        run(runtime, "stop", "--time", str(STOP_SECONDS), container)
        status = run(runtime, "inspect", "--format", "{{.State.ExitCode}}", container).stdout.strip()
        require(status == "0", f"it ends with status {status} after SIGTERM")
    finally:
        run(runtime, "rm", "--force", "--volumes", container, check=False)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
