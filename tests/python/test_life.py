"""One process's life: blocks survive it, a shared folder outlives it, mistakes at its start are said plainly."""

import subprocess

import openai
import pytest
from conftest import Server, binary

PROMPT = list(range(10, 10 + 640))


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


def test_blocks_survive_a_restart(tmp_path):
    cold, text = lived(tmp_path)
    warm, again = lived(tmp_path)
    assert cold == 0
    assert warm > len(PROMPT) // 2
    assert text == again


def test_a_shared_folder_feeds_another_server(tmp_path):
    shared = tmp_path / "shared"
    cold, text = lived(tmp_path / "one", "--shared", shared)
    warm, again = lived(tmp_path / "two", "--shared", shared)
    assert cold == 0
    assert warm > len(PROMPT) // 2
    assert text == again


def test_without_either_nothing_is_remembered(tmp_path):
    lived(tmp_path / "one")
    assert lived(tmp_path / "two")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--listen", "nonsense"], "nonsense"),
        (["--workers", "both:0"], "both:0"),
    ],
)
def test_a_mistake_at_the_start_is_named(tmp_path, arguments, named):
    # The last of two equal flags would be an error of its own, so each mistake comes alone.
    common = [] if "--model" in arguments else ["--model", "tiny"]
    command = [binary(), "serve", "--data-dir", tmp_path, *common, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert named in ended.stderr
    assert "panicked" not in ended.stderr


def test_a_taken_port_is_said_plainly(server, tmp_path):
    command = [binary(), "serve", "--model", "tiny", "--data-dir", tmp_path, "--listen", f"127.0.0.1:{server.port}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert str(server.port) in ended.stderr
    assert "panicked" not in ended.stderr
