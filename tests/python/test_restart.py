"""Starts and stops of the server: blocks survive a restart, a shared store serves other servers, startup errors."""

import subprocess

import openai
import pytest
from process import binary, environment, serve

PROMPT = list(range(10, 10 + 640))
MAX_RUNS = 30


def complete(server):
    """Completes the prompt: the number of cached prompt tokens, and the text."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text


def run_once(folder, *arguments):
    """Starts a server, completes the prompt, and stops the server with SIGTERM."""
    folder.mkdir(exist_ok=True)
    server = serve(folder, *arguments)
    server.wait_until("/ready")
    try:
        answer = complete(server)
    finally:
        status = server.stop()
    assert status == 0, server.log_tail()
    return answer


def finds_cached_prompt(runs, text):
    """Whether one of many runs found most of the prompt cached. All runs must give the same text.

    Not every run finds it: on a busy machine, recomputing blocks may be faster than loading them.
    """
    for warm, again in runs:
        assert again == text
        if warm > len(PROMPT) // 2:
            return True
    return False


def test_blocks_survive_a_restart(tmp_path):
    cold, text = run_once(tmp_path)
    assert cold < len(PROMPT) // 2
    assert finds_cached_prompt((run_once(tmp_path) for _ in range(MAX_RUNS)), text)


def test_a_shared_store_serves_another_server(tmp_path):
    shared = tmp_path / "shared"
    cold, text = run_once(tmp_path / "one", "--g4", shared)
    assert cold < len(PROMPT) // 2
    assert finds_cached_prompt((run_once(tmp_path / f"other {n}", "--g4", shared) for n in range(MAX_RUNS)), text)


def test_without_a_common_folder_no_block_is_found(tmp_path):
    run_once(tmp_path / "one")
    assert run_once(tmp_path / "two")[0] < len(PROMPT) // 2


def start_error(*arguments):
    """The standard error of a `serve` that fails to start."""
    ended = subprocess.run(
        [binary(), "serve", *arguments], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert ended.returncode != 0
    assert "panicked" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--model", "/nowhere/at/all"), ("--config", "/nowhere.toml"), ("--listen", "nonsense"), ("--workers", "both:0")],
)
def test_a_startup_error_names_the_value(tmp_path, flag, value):
    assert value in start_error("--data-dir", tmp_path, flag, value)


def test_the_error_of_a_port_in_use_names_the_address(server, tmp_path):
    address = f"127.0.0.1:{server.port}"
    assert address in start_error("--model", "tiny", "--data-dir", tmp_path, "--listen", address)
