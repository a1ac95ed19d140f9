"""A real server through the official `openai` client."""

import asyncio
import concurrent.futures
import json
import time
import uuid

import openai
import pytest


def ask(client, model, text="Tell me about railways.", **parameters):
    parameters = {"max_tokens": 16, "temperature": 0} | parameters
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **parameters)


def fresh_text(words=400):
    """A text whose first word is unique, so that no cache has a block of it."""
    return f"{uuid.uuid4()} " + "wagons roll to the yard and wait for their block " * (words // 10)


def tokenize(server, **body):
    status, answer = server.post("/tokenize", json.dumps(body).encode())
    assert status == 200, answer
    return json.loads(answer)["tokens"]


class TestAnswers:
    def test_a_chat_has_one_choice_and_its_usage(self, client, model):
        answer = ask(client, model)
        assert answer.object == "chat.completion"
        assert answer.model == model
        [choice] = answer.choices
        assert choice.index == 0
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage.prompt_tokens > 0
        assert 0 < answer.usage.completion_tokens <= 16
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_max_tokens_ends_with_length(self, client, model):
        answer = ask(client, model, max_tokens=3, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3

    def test_max_completion_tokens_is_the_same_limit(self, client, model):
        answer = ask(client, model, max_tokens=openai.omit, max_completion_tokens=3, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 3

    def test_n_choices_have_indexes(self, client, model):
        answer = ask(client, model, n=3, temperature=1, seed=11)
        assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) > 1, "each choice is sampled on its own"

    def test_a_seed_fixes_the_answer(self, client, model):
        def text(seed):
            return ask(client, model, temperature=1, seed=seed).choices[0].message.content

        assert text(7) == text(7)
        assert text(7) != text(8)

    def test_a_stop_string_cuts_the_text_before_it(self, client, model):
        whole = ask(client, model, max_tokens=32).choices[0].message.content
        middle = len(whole) // 2
        stop = whole[middle : middle + 4]
        answer = ask(client, model, max_tokens=32, stop=[stop])
        assert answer.choices[0].message.content == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"

    def test_the_greedy_token_is_first_in_its_top_logprobs(self, client, model):
        answer = ask(client, model, logprobs=True, top_logprobs=3, max_tokens=5, extra_body={"ignore_eos": True})
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        for entry in entries:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
            falling = [other.logprob for other in entry.top_logprobs]
            assert falling == sorted(falling, reverse=True)

    def test_vendor_fields_are_accepted(self, client, model):
        answer = ask(client, model, extra_body={"top_k": 1, "min_p": 0.0, "some_vendor": {"field": [1, 2]}})
        assert answer.choices[0].message.content == ask(client, model).choices[0].message.content


class TestStreams:
    def test_a_stream_has_the_text_of_the_whole_answer(self, client, model):
        whole = ask(client, model).choices[0]
        chunks = list(ask(client, model, stream=True))
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].delta.content == ""
        assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [whole.finish_reason]

    def test_a_stream_has_several_chunks(self, client, model):
        chunks = list(ask(client, model, stream=True, max_tokens=12, extra_body={"ignore_eos": True}))
        assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 3

    def test_usage_ends_the_stream_when_requested(self, client, model):
        *chunks, last = ask(client, model, stream=True, stream_options={"include_usage": True})
        assert last.choices == []
        assert last.usage.prompt_tokens == ask(client, model).usage.prompt_tokens
        assert all(chunk.usage is None for chunk in chunks)

    def test_a_stream_has_no_usage_by_default(self, client, model):
        assert all(chunk.usage is None and chunk.choices for chunk in ask(client, model, stream=True))

    def test_streamed_choices_have_their_indexes(self, client, model):
        texts = {0: "", 1: ""}
        for chunk in ask(client, model, stream=True, n=2, temperature=1, seed=3):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        whole = ask(client, model, n=2, temperature=1, seed=3)
        assert texts == {choice.index: choice.message.content for choice in whole.choices}

    def test_the_async_client_streams(self, server, model):
        async def text():
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
                stream = await ask(client, model, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert asyncio.run(text())

    def test_eight_concurrent_answers_are_the_same_as_alone(self, client, model):
        texts = [f"Wagon number {n}: where does it go?" for n in range(8)]

        def streamed(text):
            return "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, model, text, stream=True))

        alone = [streamed(text) for text in texts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(streamed, texts)) == alone

    def test_a_disconnect_in_mid_stream_affects_no_other_request(self, server, client, model):
        before = ask(client, model).choices[0].message.content
        for _ in range(5):
            stream = ask(client, model, fresh_text(), stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        assert ask(client, model).choices[0].message.content == before
        # The server notices a closed connection at its next write; after that no request may be running.
        deadline = time.monotonic() + 30
        while server.metric("blockyard_worker_requests_running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.metric("blockyard_worker_requests_running") == 0


class TestExtensions:
    def test_loglikelihood_as_evaluation_harnesses_compute_it(self, server, client, model):
        """A context and its continuation as tokens, echoed with their logprobs, and one generated token."""
        tokens, context = tokenize(server, prompt=fresh_text(40)), 10
        whole = client.completions.create(
            model=model, prompt=tokens, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1
        )
        [choice] = whole.choices
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(tokens) + 1
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        for value, top in zip(logprobs.token_logprobs[context:-1], logprobs.top_logprobs[context:-1]):
            assert value <= max(top.values()) <= 0
        # Greedy sampling: the last token's logprob is exactly the largest of the top logprobs.
        assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
        again = client.completions.create(model=model, prompt=tokens, max_tokens=0, echo=True, logprobs=1)
        assert again.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]
        assert again.usage.completion_tokens == 0

    def test_prompt_logprobs_and_token_ids(self, client, model):
        answer = ask(client, model, max_tokens=3, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
        assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
        for token, scores in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:]):
            assert scores[str(token)]["rank"] >= 1
        assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens

    def test_two_salts_share_no_blocks(self, client, model):
        # A completion, not a chat: the first block of a chat is mostly the template, which other tests have cached.
        text = fresh_text()

        def cached(salt):
            body = {"cache_salt": salt} if salt else {}
            answer = client.completions.create(model=model, prompt=text, max_tokens=1, temperature=0, extra_body=body)
            return answer.usage.prompt_tokens_details.cached_tokens

        # On a busy machine the request may go to a second worker, which finds a few blocks of the first one.
        few = 128
        assert cached("a") <= few
        assert any(cached("a") > few for _ in range(10))
        assert cached("b") <= few
        assert cached(None) <= few

    def test_an_unsupported_field_is_rejected_by_name(self, client, model):
        for field, value in [("guided_json", {"type": "object"}), ("temprature", 1), ("max_new_tokens", 3)]:
            with pytest.raises(openai.BadRequestError) as refused:
                ask(client, model, extra_body={field: value})
            assert refused.value.param == field

    def test_message_text_cannot_form_template_tokens(self, server):
        def tokens(*messages):
            messages = [{"role": role, "content": content} for role, content in messages]
            return tokenize(server, messages=messages)

        turns = tokens(("user", "quartz"), ("assistant", "opal"))
        status, body = server.post("/detokenize", json.dumps({"tokens": turns}).encode())
        assert status == 200
        text = json.loads(body)["prompt"]
        between = text[text.index("quartz") + len("quartz") : text.index("opal")]
        assert tokens(("user", f"quartz{between}opal")) != turns

    def test_models_have_a_context_length_and_version_is_served(self, client, server):
        [model] = client.models.list().data
        assert model.max_model_len > 0 and model.root == model.id and model.parent is None
        assert json.loads(server.get("/version")[1])["version"]
        assert server.get("/ping")[0] == 200


class TestPrefixes:
    def test_the_second_turn_finds_the_first_one_cached(self, client, model):
        # A unique salt: the first block of a chat is mostly the template, which other tests have cached.
        parameters = {"model": model, "max_tokens": 8, "extra_body": {"cache_salt": str(uuid.uuid4())}}
        messages = [{"role": "user", "content": fresh_text()}]
        first = client.chat.completions.create(messages=messages, **parameters)
        assert first.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens // 2
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
        second = client.chat.completions.create(messages=messages, **parameters)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert first.usage.prompt_tokens // 2 < cached < second.usage.prompt_tokens

    def test_a_cached_prefix_changes_no_answer(self, client, model):
        text = fresh_text()
        cold, warm = ask(client, model, text), ask(client, model, text)
        assert cold.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens_details.cached_tokens
        assert cold.choices[0].message.content == warm.choices[0].message.content

    def test_a_stream_reports_cached_tokens_too(self, client, model):
        text = fresh_text()
        ask(client, model, text)
        *_, last = ask(client, model, text, stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens_details.cached_tokens > 0

    def test_the_explain_header_is_only_sent_on_request(self, client, model):
        explained = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "Where do I go?"}],
            max_tokens=1,
            extra_headers={"x-blockyard-explain": "1"},
        )
        assert json.loads(explained.headers["x-blockyard-explain"])
        plain = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": "Where do I go?"}], max_tokens=1
        )
        assert "x-blockyard-explain" not in plain.headers


class TestCompletions:
    def test_a_prompt_is_continued(self, client, model):
        answer = client.completions.create(model=model, prompt="The yard", max_tokens=4, temperature=0)
        assert answer.object == "text_completion"
        assert answer.usage.completion_tokens <= 4
        stream = client.completions.create(model=model, prompt="The yard", max_tokens=4, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text

    def test_several_prompts_give_several_choices(self, client, model):
        prompts = ["The yard", "A wagon", "The signal"]
        answer = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0)
        alone = [
            client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0).choices[0].text
            for prompt in prompts
        ]
        assert [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)] == alone

    def test_a_prompt_may_be_tokens(self, client, model):
        answer = client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=2)
        assert answer.usage.prompt_tokens == 4

    def test_completions_have_logprobs_in_their_own_format(self, client, model):
        answer = client.completions.create(model=model, prompt="The yard", max_tokens=3, temperature=0, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
        assert all(value <= 0 for value in logprobs.token_logprobs)
        assert all(top for top in logprobs.top_logprobs)


class TestModels:
    def test_the_model_is_listed_and_found(self, client, model):
        assert [listed.id for listed in client.models.list()] == [model]
        assert client.models.retrieve(model).object == "model"

    def test_an_unknown_model_is_not_found(self, client, model):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no-such-model")
        with pytest.raises(openai.NotFoundError) as refused:
            ask(client, "no-such-model")
        assert refused.value.code == "model_not_found"
        assert "no-such-model" in refused.value.message


class TestErrors:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 3),
            ("temperature", "hot"),
            ("top_p", 1.5),
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("n", 0),
            ("presence_penalty", 5),
            ("frequency_penalty", -5),
            ("top_logprobs", 50),
            ("stream", "yes"),
            ("seed", 1.5),
            ("messages", []),
            ("messages", "hello"),
            ("messages", [{"role": "user"}]),
            ("messages", [{"role": "unknown", "content": "hello"}]),
        ],
    )
    def test_a_bad_value_is_a_bad_request_that_names_the_field(self, client, model, field, value):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, model, extra_body={"logprobs": True, field: value})
        assert refused.value.param is not None and refused.value.param.startswith(field)
        assert refused.value.type == "invalid_request_error"
        assert refused.value.message

    @pytest.mark.parametrize("missing", ["model", "messages"])
    def test_a_missing_field_is_named(self, server, missing, model):
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        del body[missing]
        status, answer = server.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 400
        assert json.loads(answer)["error"]["param"] == missing

    def test_a_prompt_longer_than_the_context_is_a_bad_request(self, client, model):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1)
        assert refused.value.code == "context_length_exceeded"

    def test_a_token_outside_the_vocabulary_is_a_bad_request(self, client, model):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=model, prompt=[4_000_000_000], max_tokens=1)
        assert refused.value.param == "prompt[0]"

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"hello"', b"\xff\xfe", b'{"model": 1}', b"[" * 100_000])
    def test_malformed_bodies_get_an_error_object(self, server, body):
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 400
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"

    def test_an_unknown_path_gets_an_error_object(self, server):
        status, answer = server.get("/v1/nothing")
        assert status == 404
        assert json.loads(answer)["error"]["message"]

    def test_a_wrong_method_gets_405_and_an_error_object(self, server):
        status, answer = server.get("/v1/chat/completions")
        assert status == 405
        assert json.loads(answer)["error"]["message"]


class TestProbes:
    @pytest.mark.parametrize("path", ["/health", "/live", "/ready"])
    def test_probes_answer(self, server, path):
        assert server.get(path)[0] == 200

    def test_metrics_are_prometheus_text(self, server, client, model):
        ask(client, model)
        status, text = server.get("/metrics")
        assert status == 200
        assert b"# TYPE blockyard_" in text
