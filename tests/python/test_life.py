"""One process's life: blocks survive it, a shared folder outlives it, mistakes at its start are said plainly."""

import subprocess

import openai
import pytest
from conftest import Server, binary, environment

PROMPT = list(range(10, 10 + 640))
LIVES = 30


def cached_tokens(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text


def lived(folder, *arguments):
    """Starts a server, asks it, stops it as an operator would."""
    folder.mkdir(exist_ok=True)
    server = Server(folder, *arguments)
    server.wait_until_ready()
    try:
        answer = cached_tokens(server)
    finally:
        status = server.stop()
    assert status == 0, server.log_tail()
    return answer


def relived(lives, text):
    """Whether one of many lives found most of the prompt. Each says the same; on a busy machine computing it may be quicker."""
    for warm, again in lives:
        assert again == text
        if warm > len(PROMPT) // 2:
            return True
    return False


def test_blocks_survive_a_restart(tmp_path):
    cold, text = lived(tmp_path)
    assert cold < len(PROMPT) // 2
    assert relived((lived(tmp_path) for _ in range(LIVES)), text)


def test_a_shared_folder_feeds_another_server(tmp_path):
    shared = tmp_path / "shared"
    cold, text = lived(tmp_path / "one", "--g4", shared)
    assert cold < len(PROMPT) // 2
    assert relived((lived(tmp_path / f"other {n}", "--g4", shared) for n in range(LIVES)), text)


def test_without_either_nothing_is_remembered(tmp_path):
    lived(tmp_path / "one")
    assert lived(tmp_path / "two")[0] < len(PROMPT) // 2


def refused(*arguments):
    """What a `serve` that does not start says."""
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
def test_a_mistake_at_the_start_is_named(tmp_path, flag, value):
    assert value in refused("--data-dir", tmp_path, flag, value)


def test_a_taken_port_is_said_plainly(server, tmp_path):
    address = f"127.0.0.1:{server.port}"
    assert address in refused("--model", "tiny", "--data-dir", tmp_path, "--listen", address)
