"""Greedy streams of a server that is killed are continued on the other one: their text is that without the failure."""

import json
import re
import signal
import threading
import time

import openai
import pytest
from conftest import MAX_WAIT_SECONDS, MODEL, serve, wait_for

STREAMS = 4
# Of each stream: seconds, so that all run when the server is killed.
TOKENS = 800
# In which streams may end before the servers are stopped.
ROUNDS = 5


def answer(client, number, on_chunk=lambda: None):
    """The text of a greedy stream, and its tokens of the prompt and of the text. Every other stream is a chat."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "stream": True}
    options["stream_options"] = {"include_usage": True}
    # The text of a random model seldom ends by itself.
    options["extra_body"] = {"ignore_eos": True}
    prompt = f"The yard sorts wagons of train {number}: café, 漢字."
    if number % 2:
        chunks = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
    else:
        chunks = client.completions.create(prompt=prompt, **options)
    text, ids, usages = "", set(), []
    for chunk in chunks:
        ids.add((chunk.id, chunk.created, chunk.object))
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            text += (choice.delta.content if number % 2 else choice.text) or ""
            assert not (choice.model_extra or {}).get("token_ids"), "they are removed"
        on_chunk()
    assert len(ids) == 1 and len(usages) == 1
    return text, usages[0].prompt_tokens, usages[0].completion_tokens


class Streams:
    """Streams that run at the same time."""

    def __init__(self, client, engines):
        self.client, self.engines = client, engines
        self.chunks, self.outcomes = [0] * STREAMS, [None] * STREAMS
        self.all_have_begun = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(number,)) for number in range(STREAMS)]
        for thread in self.threads:
            thread.start()

    def ask(self, number):
        def on_chunk():
            self.chunks[number] += 1
            # A server that is busy sends few chunks, of many tokens each.
            if min(self.chunks) >= 2 and not self.all_have_begun.is_set():
                self.signal(signal.SIGSTOP)
                self.all_have_begun.set()

        try:
            self.outcomes[number] = answer(self.client, number, on_chunk)
        except openai.OpenAIError as error:
            self.outcomes[number] = error

    def signal(self, signal):
        for engine in self.engines:
            engine.signal(signal)

    def pause(self):
        """Stops the servers when all streams have begun. Whether all of them have still to end."""
        assert self.all_have_begun.wait(MAX_WAIT_SECONDS), "all streams have begun"
        # What the servers had sent arrives.
        time.sleep(1)
        return not any(self.outcomes)

    def finish(self):
        """Lets the servers go on, and waits for the end of all streams."""
        self.signal(signal.SIGCONT)
        for thread in self.threads:
            thread.join()


def test_greedy_streams_of_a_killed_server_have_the_text_without_the_failure(folder, engines):
    config = folder / "continue.toml"
    tables = (f"[[upstreams]]\nurl = {json.dumps(engine.url)}\ncontinue_streams = true\n" for engine in engines)
    # The log names the workers of the servers.
    config.write_text("\n".join(['log.filter = "info,router=debug"', *tables]))
    gateway = serve(folder, "--config", config, model=None)
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=120)
    try:
        gateway.wait_until("/ready")
        wait_for(lambda: gateway.metric("blockyard_router_workers") == len(engines), "all servers are registered")

        def requests_to(engine):
            worker = re.search(rf"worker joined worker=(\w+) .*address={engine.url}/", gateway.log.read_text())[1]
            return gateway.metric("blockyard_router_requests_total", f'worker="{worker}"', default=0)

        undisturbed = [answer(client, number) for number in range(STREAMS)]
        assert all(completion_tokens == TOKENS for _, _, completion_tokens in undisturbed)
        for _ in range(ROUNDS):
            before = {engine: requests_to(engine) for engine in engines}
            streams = Streams(client, engines)
            if streams.pause():
                break
            streams.finish()
        else:
            pytest.fail(f"in each of {ROUNDS} rounds a stream ended before all had begun")
        # The servers are stopped, so that none of the streams ends before the kill, however busy the machine is.
        busiest = max(engines, key=lambda engine: requests_to(engine) - before[engine])
        assert requests_to(busiest) > before[busiest]
        # No later test needs it (`conftest.py`).
        busiest.kill()
        streams.finish()
        assert streams.outcomes == undisturbed
        moves = "blockyard_router_stream_moves_total"
        assert gateway.metric(moves, 'outcome="continued"') > 0
        assert gateway.metric(moves, 'outcome="failed"', default=0) == 0
    finally:
        client.close()
        gateway.kill()
