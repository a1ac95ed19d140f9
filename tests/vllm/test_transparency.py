"""An answer through the gateway is the answer of vLLM, byte for byte except ids and times."""

import itertools
import json
import re

import pytest
from conftest import MODEL, add_key, gateway_of, settle

CHAT = {"messages": [{"role": "user", "content": "The yard sorts wagons."}]}
COMPLETION = {"prompt": "The yard sorts"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"name": "answer", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
# All fields of vLLM's chat and completions, valid values and invalid ones.
FIELDS = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"n": 0},
    {"n": 99999},
    {"best_of": 2},
    {"use_beam_search": True, "n": 2},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"max_tokens": 99999},
    {"max_completion_tokens": 3},
    {"min_tokens": 3},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 5},
    {"temperature": "hot"},
    {"top_p": 0.5},
    {"top_p": 2},
    {"top_k": 3},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"logit_bias": {"5": 3}},
    {"allowed_token_ids": [5, 6]},
    {"bad_words": ["a"]},
    {"stop": ["a"]},
    {"stop": ["a", "e"], "include_stop_str_in_output": True},
    {"stop_token_ids": [7]},
    {"ignore_eos": True},
    {"skip_special_tokens": False},
    {"spaces_between_special_tokens": False},
    {"detokenize": False},
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True, "logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 30},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"echo": True},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "("}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"parallel_tool_calls": False},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": None},
    {"truncate_prompt_tokens": 3},
    {"priority": 3},
    {"cache_salt": "salt"},
    {"user": "user"},
    {"metadata": {"a": "b"}},
    {"request_id": "abc"},
    {"kv_transfer_params": {}},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"a": 1}},
    {"suffix": "x"},
    {"truncate_prompt_tokens": 3, "truncation_side": "left"},
    {"use_beam_search": True, "n": 2, "length_penalty": 0.5},
    {"logprobs": True, "logprob_token_ids": [5, 6]},
    {"thinking_token_budget": 3},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
    {"stream_interval": 2},
    {"vllm_xargs": {"a": 1}, "ec_transfer_params": {}},
    {"session_id": "session", "watermarking": True, "routed_experts_prompt_start": 1},
    {"return_token_offsets": True, "mm_payload": "none"},
    {"return_mm_kwargs": False},
    {"unknown_field": 1},
]
CHAT_FIELDS = [
    {"messages": []},
    {"messages": "text"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "king", "content": "hello"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello é 漢字 🚂"}]},
    {"add_special_tokens": True},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"chat_template": "{{ messages[0].content }}"},
    {"documents": [{"title": "title", "text": "text"}]},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "much"},
    {"include_reasoning": False},
    {"return_prompt_text": True},
    {"media_io_kwargs": {"image": {"a": 1}}},
    {"mm_processor_kwargs": {"a": 1}},
]
COMPLETION_FIELDS = [
    {"prompt": ["a", "b"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6, 7], [8, 9]]},
    {"prompt": ""},
    {"prompt": 7},
    {"prompt": [999_999]},
    {"prompt_embeds": "AAAA"},
    {"add_special_tokens": False},
]
# What is also sent with an API key.
FIELDS_WITH_KEYS = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"n": 0},
    {"temperature": "hot"},
    {"stop": ["a", "e"], "include_stop_str_in_output": True},
    {"return_token_ids": True},
    {"logprobs": True, "top_logprobs": 3},
    {"prompt_logprobs": 1},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": None},
    {"cache_salt": "salt"},
    {"cache_salt": None},
    {"unknown_field": 1},
]
MESSAGE = {"max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "x"}]}
OTHER = [
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", CHAT),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "temperature": 0}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "temperature": 0, "stream": True}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"stream": True}),
    ("/v1/embeddings", {"input": "x"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/nonsense", {}),
]
# vLLM puts tokens that are ready at the same time into one chunk, so the chunks of two equal requests may differ.
ATTEMPTS = 8


def requests():
    endpoints = [("/v1/chat/completions", CHAT, CHAT_FIELDS), ("/v1/completions", COMPLETION, COMPLETION_FIELDS)]
    for path, prompt, own in endpoints:
        for fields, stream in itertools.product(FIELDS + own, (False, True)):
            yield path, {**prompt, "max_tokens": 6, "temperature": 0, **fields, "stream": stream}
    yield from OTHER


def without_ids_and_times(body):
    body = re.sub(rb'"id":"(chatcmpl|cmpl|resp|embd|msg|score|rerank)[^"]*"', b'"id":"X"', body)
    body = re.sub(rb"\b(chatcmpl|cmpl|resp|msg|rs)[-_][0-9a-f-]{16,}", b"X", body)
    return re.sub(rb'"(created|created_at|completed_at)":[0-9.]+', rb'"\1":0', body)


def by_choice(stream):
    """The events of a stream, ordered by choice. vLLM mixes the choices of a stream as they come."""
    events = stream.split(b"\n\n")
    choices = [re.search(rb'"choices":\[\{"index":(\d+)', event) for event in events]
    numbers = [int(choice[1]) if choice else -1 for choice in choices]
    return b"\n\n".join(event for _, event in sorted(zip(numbers, events), key=lambda pair: pair[0]))


def exchange(server, path, body, **headers):
    request = json.dumps({"model": MODEL} | body).encode()
    status, answer, headers = server.post_with_headers(path, request, **headers)
    answer = without_ids_and_times(answer)
    return status, headers["content-type"], by_choice(answer) if body.get("stream") else answer


def assert_answers_are_equal(requests, engine, gateway, change=lambda answer: answer, **headers):
    """Sends requests to vLLM and through a gateway. `change`: what is changed in the bodies of both."""
    differing, count = [], 0
    for path, body in requests:
        count += 1
        direct, relayed = [], []
        for _ in range(ATTEMPTS):
            for server, answers, own in ((engine, direct, {}), (gateway, relayed, headers)):
                status, content_type, answer = exchange(server, path, body, **own)
                answers.append((status, content_type, change(answer)))
            if set(direct) & set(relayed):
                break
        else:
            differing.append((path, body, direct[-1], relayed[-1]))
    assert not differing, f"{len(differing)} of {count} requests, the first: {differing[0]}"
    return count


@pytest.fixture(scope="module")
def gateway_of_one(folder, engines):
    with gateway_of(folder, engines[:1]) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def keys(folder):
    """The API keys of two tenants."""
    return {tenant: add_key(folder / "keys.toml", tenant) for tenant in ("ann", "bob")}


@pytest.fixture(scope="module")
def gateway_with_keys(folder, engines, keys):
    with gateway_of(folder, engines[:1], "--set", f"frontend.api_keys_file={folder / 'keys.toml'}") as gateway:
        yield gateway


def test_all_fields_of_vllm_are_sent(engines):
    description = json.loads(engines[0].server.get("/openapi.json")[1])
    for endpoint in ("/v1/chat/completions", "/v1/completions"):
        body = description["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = description["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        known = set(schema["properties"])
        sent = {"model"}.union(*(fields for path, fields in requests() if path == endpoint))
        assert {"stream", "cache_salt"} < known, "the schema is read"
        assert known <= sent, f"{endpoint}: no test sends {sorted(known - sent)}"


def test_answers_are_those_of_vllm(gateway_of_one, engines):
    assert assert_answers_are_equal(requests(), engines[0].server, gateway_of_one) > 200


def without_fingerprint(answer):
    """The usage of streams is asked for. Then only the choice of a stream that ends last has the fingerprint."""
    return re.sub(rb',"system_fingerprint":("[^"]*"|null)', b"", answer)


def test_answers_to_tenants_are_those_of_vllm(gateway_with_keys, keys, engines):
    """Each request gets a salt, and each stream is asked for its usage.

    Left out are endpoints without `cache_salt`, which get no requests of tenants. The prompts have less than a block,
    so that no answer depends on what is cached.
    """
    requests = [
        (path, {**prompt, "max_tokens": 6, "temperature": 0, **fields, "stream": stream})
        for path, prompt in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION))
        for fields, stream in itertools.product(FIELDS_WITH_KEYS, (False, True))
    ]
    with_salt = {"/v1/responses"}
    without_cache = {"/tokenize", "/detokenize", "/v1/embeddings"}
    requests += [other for other in OTHER if other[0] in with_salt | without_cache]
    key = f"Bearer {keys['ann']}"
    assert_answers_are_equal(requests, engines[0].server, gateway_with_keys, without_fingerprint, authorization=key)


def test_a_tenant_finds_its_own_blocks_alone(gateway_with_keys, keys):
    gateway = gateway_with_keys
    prompt = " ".join(str(number) for number in range(200))

    def ask(tenant, **fields):
        """The cached tokens of the prompt, as predicted and as reported."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        headers = {"authorization": f"Bearer {keys[tenant]}", "x-blockyard-explain": "1"}
        status, answer, headers = gateway.post_with_headers("/v1/completions", json.dumps(body).encode(), **headers)
        assert status == 200, answer
        details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
        settle(gateway)
        return json.loads(headers["x-blockyard-explain"])["cached_tokens"], details.get("cached_tokens") or 0

    assert ask("ann") == (0, 0)
    hit = ask("ann")
    assert hit[0] == hit[1] > 100
    assert ask("bob") == (0, 0), "it is another tenant"
    assert ask("bob") == hit
    assert ask("ann", cache_salt="salt") == (0, 0), "it is another salt"
    assert ask("ann", cache_salt="salt") == hit
    assert ask("ann") == hit
    assert gateway.post("/v1/completions", b"{}")[0] == 401, "the gateway asks for a key"
