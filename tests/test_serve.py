"""The server: what OpenAI's own client gets from it, and what it refuses."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from cli_helpers import run_main
from families import LETTERS, make_model, make_tokenizer, save
from part_references import add_drafting_layers, weakened
from serving import JSON, Served, serving

import specgen
from specgen.base.grammars import Grammar
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair
from specgen.serve import requests
from specgen.serve.access import Access
from specgen.serve.app import public_name
from specgen.serve.errors import ApiError
from specgen.serve.requests import LARGEST_SCHEMA

PROMPT = "def fibonacci(n):"
MESSAGES: Any = [{"role": "user", "content": "Where does an eagle live?"}]


def described(schema: Any) -> dict[str, Any]:
    """A `response_format` with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    base = f"{served.address}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert client.models.retrieve(model(client)).owned_by == "specgen"


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, demo_pair: Pair) -> None:
    expected = demo_pair.generate(PROMPT, "svip", max_new_tokens=40)
    answer = client.completions.create(model=model(client), prompt=PROMPT, max_tokens=40)
    assert (answer.object, answer.choices[0].text) == ("text_completion", expected.text)
    assert answer.choices[0].finish_reason == "length"
    counts = answer.usage
    assert counts is not None
    assert counts.completion_tokens_details is not None
    details = counts.completion_tokens_details
    assert counts.completion_tokens == 40
    assert counts.total_tokens == counts.prompt_tokens + 40
    assert details.accepted_prediction_tokens == expected.summary["accepted"] > 0
    rejected = expected.summary["drafted"] - expected.summary["accepted"]
    assert details.rejected_prediction_tokens == rejected > 0


def test_a_conversation_is_answered_whole_and_streamed(
    client: openai.OpenAI, demo_pair: Pair
) -> None:
    expected = demo_pair.generate(MESSAGES, "svip", max_new_tokens=100)
    name = model(client)
    answer = client.chat.completions.create(model=name, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "stop"

    stream = client.chat.completions.create(
        model=name, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == expected.summary["new_tokens"]


def test_without_include_usage_no_chunk_has_it(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=model(client), prompt=PROMPT, max_tokens=8, stream=True
    )
    chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_content_may_come_in_parts_and_from_a_developer(
    client: openai.OpenAI, demo_pair: Pair
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given: Any = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    same = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]
    answer = client.chat.completions.create(model=model(client), messages=given, max_tokens=9)
    assert (
        answer.choices[0].message.content == demo_pair.generate(same, "svip", max_new_tokens=9).text
    )


def test_stop_texts_end_an_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=model(client), prompt=PROMPT, max_tokens=40)
    text = whole.choices[0].text
    stop = text[20:23]
    for given in (stop, [stop], ["never there", stop]):
        for streamed in (False, True):
            found = client.completions.create(
                model=model(client), prompt=PROMPT, max_tokens=40, stop=given, stream=streamed
            )
            choices = [chunk.choices[0] for chunk in (found if streamed else [found])]  # type: ignore[attr-defined]
            assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
            assert choices[-1].finish_reason == "stop"


def test_a_seed_gives_the_same_answers_twice_and_n_others(
    client: openai.OpenAI, demo_pair: Pair
) -> None:
    def answers(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model=model(client),
            prompt=PROMPT,
            max_tokens=24,
            temperature=1.0,
            top_p=0.9,
            seed=seed,
            n=n,
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 24 * n
        return [choice.text for choice in answer.choices]

    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.9, seed=6)
    three = answers(3, 5)
    assert three == answers(3, 5)
    assert answers(1, 6) == [three[1]] == [demo_pair.generate(PROMPT, "svip", sampling).text]
    assert len({*three}) > 1
    # seeds are signed, and wrap around
    assert answers(1, -1) == answers(1, -1) != answers(1, 0)
    assert answers(2, (1 << 63) - 1)[1:] == answers(1, 0)


def test_several_prompts_as_texts_and_as_ids(client: openai.OpenAI, demo_pair: Pair) -> None:
    texts = [PROMPT, "The sea"]
    ids = [demo_pair.tokenizer.encode(text) for text in texts]
    expected = [demo_pair.generate(text, "svip", max_new_tokens=16).text for text in texts]
    for given in (texts, ids):
        answer = client.completions.create(model=model(client), prompt=given)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    answer = client.completions.create(model=model(client), prompt=ids[0])
    assert [choice.text for choice in answer.choices] == expected[:1]


def test_the_second_turn_costs_its_new_tokens(client: openai.OpenAI, demo_pair: Pair) -> None:
    demo_pair.forget()
    first = client.chat.completions.create(model=model(client), messages=MESSAGES)
    turns: Any = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
    turns.append({"role": "user", "content": "And a seal?"})
    second = client.chat.completions.create(model=model(client), messages=turns)
    before, after = first.usage, second.usage
    assert before is not None
    assert after is not None
    assert before.prompt_tokens_details is not None
    assert after.prompt_tokens_details is not None
    assert before.prompt_tokens_details.cached_tokens == 0
    cached = after.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= before.total_tokens - 2


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": 1e-6}),
        ("temperature", {"temperature": "warm"}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.5}),
        ("top_k", {"top_k": 1.5}),
        ("min_p", {"min_p": 2}),
        ("seed", {"seed": 1 << 64}),
        ("n", {"n": 0}),
        ("n", {"n": True}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": 5}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": -3}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hello"}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        (
            "messages[0].content",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        ),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": described({"enum": []})}),
        ("response_format", {"response_format": described({"enum": ["x" * LARGEST_SCHEMA]})}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("logit_bias", {"logit_bias": {"5": 3}}),
        ("guided_json", {"guided_json": {"type": "object"}}),
        ("guided_regex", {"guided_regex": "yes|no"}),
        ("guided_choice", {"guided_choice": ["yes", "no"]}),
        ("guided_grammar", {"guided_grammar": 'start: "yes"'}),
        ("json_schema", {"json_schema": {"type": "object"}}),
        ("regex", {"regex": "yes|no"}),
        ("grammar", {"grammar": 'start: "yes"'}),
        ("structured_outputs", {"structured_outputs": {"regex": "yes|no"}}),
        ("specgen.regex", {"specgen": {"regex": "yes|no"}}),
        ("modalities", {"modalities": ["audio"]}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": "x"}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 1}),
        ("prediction", {"prediction": "text"}),
        ("prediction", {"prediction": {"type": "content"}}),
        ("specgen.method", {"specgen": {"method": "svib"}}),
        ("specgen.method", {"specgen": {"method": "svip:threshold=x"}}),
        ("messages", {"messages": [{"role": "user", "content": "word " * 3000}]}),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_names_the_field(
    client: openai.OpenAI, field: str, body: dict[str, Any]
) -> None:
    given = {"messages": MESSAGES, "max_completion_tokens": 4, **body}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model(client), messages=given.pop("messages"), extra_body=given
        )
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert len(str(caught.value)) < 400


def test_streams_go_on_while_a_schema_is_checked(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_begun = threading.Event()
    may_end = threading.Event()
    has_been_told = []

    def checked(_: Any) -> None:
        is_begun.set()
        has_been_told.append(may_end.wait(5))

    monkeypatch.setattr(requests, "check_grammar", checked)
    body = {"messages": MESSAGES, "max_tokens": 1, "response_format": {"type": "json_object"}}
    with serving(demo_pair) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, "/v1/chat/completions", body)
        assert is_begun.wait(20)
        assert served.ask("/health")[0] == 200
        may_end.set()
        assert answer.result()[0] == 200
    assert has_been_told == [True], "the other request was answered only after the check"


def test_unknown_fields_and_neutral_values_are_taken(client: openai.OpenAI) -> None:
    more = {
        "top_k": -1,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "x",
        "something": {"else": 1},
        "logit_bias": {},
        "stream_options": None,
        "stop": None,
        "temperature": None,
    }
    answer = client.chat.completions.create(
        model=model(client), messages=MESSAGES, max_tokens=4, extra_body=more
    )
    assert answer.choices[0].finish_reason == "length"


def test_another_model_and_other_addresses_are_not_there(
    client: openai.OpenAI, served: Served
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert caught.value.param == "model"
    assert model(client) in str(caught.value)
    with pytest.raises(openai.NotFoundError, match="take /v1/chat/completions"):
        client.responses.create(model=model(client), input="Hello")
    status, _, answer = served.ask("/v1/completions")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


def test_rounds_and_another_method_for_one_request(served: Served, demo_pair: Pair) -> None:
    own = {"rounds": True, "method": "ar"}
    body = {"prompt": PROMPT, "max_tokens": 12}
    _, _, plain = served.ask("/v1/completions", {**body, "specgen": own})
    _, _, drafted = served.ask("/v1/completions", {**body, "specgen": {"rounds": True}})
    assert plain["choices"] == drafted["choices"]
    rounds = drafted["specgen"]["rounds"]
    assert any(round_["draft_ids"] for round_ in rounds)
    assert not any(round_["draft_ids"] for round_ in plain["specgen"]["rounds"])
    ids = [token for round_ in rounds for token in [*round_["accepted_ids"], round_["token_id"]]]
    assert ids == demo_pair.generate(PROMPT, "ar", max_new_tokens=12).token_ids
    assert drafted["specgen"]["summary"]["method"] == "svip"
    _, _, text = served.ask(
        "/v1/completions", {**body, "specgen": {"rounds": True}, "stream": True}
    )
    assert text.count('"draft_texts"') == len(rounds)


def test_the_start_says_what_requests_leave_out(demo_pair: Pair) -> None:
    default = SamplingParams(temperature=1.0, seed=3)
    with serving(demo_pair, default=default) as served:
        body = {"prompt": PROMPT, "max_tokens": 20}
        _, _, first = served.ask("/v1/completions", body)
        _, _, greedy = served.ask("/v1/completions", {**body, "temperature": 0})
    sampled = demo_pair.generate(PROMPT, "svip", default, max_new_tokens=20)
    assert first["choices"][0]["text"] == sampled.text
    assert greedy["choices"][0]["text"] == demo_pair.generate(PROMPT, "ar", max_new_tokens=20).text


def test_the_start_says_what_answers_match(demo_pair: Pair) -> None:
    """Those to requests without a format of their own, which may be any text."""
    regex = Grammar("regex", "(yes|no), [a-z]{3}")
    expected = demo_pair.generate(MESSAGES, "svip", grammar=regex).text
    free = demo_pair.generate(MESSAGES, "svip", max_new_tokens=8).text
    chat: Any = {"messages": MESSAGES, "max_tokens": 8}
    with serving(demo_pair, default=SamplingParams(grammar=regex)) as served:
        found = []
        for kind in (None, "text", "json_object"):
            own = {} if kind is None else {"response_format": {"type": kind}}
            _, _, answer = served.ask("/v1/chat/completions", {**chat, **own})
            found.append(answer["choices"][0]["message"]["content"])
        _, _, completion = served.ask("/v1/completions", {"prompt": PROMPT})
    assert found[:2] == [expected, free]
    assert found[2].startswith("{")
    assert re.fullmatch(regex.text, expected)
    assert re.fullmatch(regex.text, completion["choices"][0]["text"])


METHODS = {
    # mtp's layers are not in the bundled target: see below
    **{name: {} for name, method in specgen.METHODS.items() if method.lossless and name != "mtp"},
    "sd": {"width": 2, "depth": 3},
    "selfsd": {"skip": "1"},
}


@pytest.mark.parametrize("method", METHODS)
def test_each_lossless_method_gives_the_same_text(demo_pair: Pair, method: str) -> None:
    expected = demo_pair.generate(PROMPT, method, max_new_tokens=24, **METHODS[method])
    with serving(demo_pair, method, METHODS[method]) as served:
        body = {"prompt": PROMPT, "max_tokens": 24, "specgen": {"rounds": True}}
        status, _, answer = served.ask("/v1/completions", body)
    assert (status, answer["choices"][0]["text"]) == (200, expected.text)
    assert expected.text == demo_pair.generate(PROMPT, "ar", max_new_tokens=24).text
    assert answer["specgen"]["summary"]["method"] == method


def test_drafting_layers_in_the_targets_own_files_give_the_same_text(tmp_path: Path) -> None:
    model = weakened(make_model("llama"))
    folder = tmp_path / "drafting"
    save(model, folder, make_tokenizer(LETTERS))
    add_drafting_layers(model, folder)
    with specgen.load(str(folder), device="cpu", dtype="float32") as pair:
        sampling = SamplingParams(24, temperature=1.0, seed=5)
        greedy = pair.generate("hello", "ar", max_new_tokens=24).text
        sampled = pair.generate("hello", "mtp", sampling).text
        body = {"prompt": "hello", "max_tokens": 24}
        with serving(pair, "mtp") as served:
            _, _, models = served.ask("/v1/models")
            _, _, first = served.ask("/v1/completions", body)
            _, _, second = served.ask("/v1/completions", {**body, "temperature": 1, "seed": 5})
    assert [answer["choices"][0]["text"] for answer in (first, second)] == [greedy, sampled]
    details = first["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert models["data"][0]["id"] == "drafting", "no path on this machine"


def test_only_the_servers_method_and_plain_decoding_can_be_asked_for(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    for method, status in {"svip": 200, "ar": 200, None: 200, "sd": 400, "svip:c=1": 400}.items():
        answer = served.ask("/v1/completions", {**body, "specgen": {"method": method}})
        assert answer[0] == status
        if status == 400:
            assert answer[2]["error"]["param"] == "specgen.method"
            assert answer[2]["error"]["message"].startswith("this server decodes with svip")


def test_rounds_say_what_a_page_shows(served: Served) -> None:
    own = {"specgen": {"rounds": True}, "max_tokens": 30, "temperature": 1.0, "seed": 3}
    _, _, answer = served.ask("/v1/completions", {**own, "prompt": PROMPT, "stop": "return"})
    rounds = answer["specgen"]["rounds"]
    shown = [piece for round_ in rounds for piece in round_["shown"]]
    assert "".join(piece["text"] for piece in shown) == answer["choices"][0]["text"]
    assert {piece["drafted"] for piece in shown} == {True, False}
    for round_ in rounds:
        accepted = round_["statuses"].count("accepted")
        assert accepted == len(round_["accepted_ids"])
        assert len(round_["statuses"]) == len(round_["draft_ids"])
        assert round_["statuses"].count("rejected") == (round_["source"] == "correction")


def test_the_description_loads_nothing(served: Served) -> None:
    status, headers, text = served.ask("/docs")
    assert status == 200
    assert "text/html" in headers["content-type"]
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "max_completion_tokens" in text
    assert "src=" not in text
    assert "<link" not in text


def test_nothing_of_a_request_is_logged(demo_pair: Pair) -> None:
    secret = "xylophone"
    with serving(demo_pair) as served:
        served.ask("/v1/completions", {"prompt": secret, "max_tokens": 2, "stop": secret})
        served.ask("/v1/completions", {"prompt": secret, "temperature": secret})
        served.ask(f"/{secret}?{secret}")
        served.ask("/v1/completions", secret.encode())
        lines = list(served.log)
    assert len(lines) == 4
    assert lines[0].startswith("200 ")
    assert secret not in "".join(lines)


# who may ask

KEY = "k" * 20


def test_without_the_key_only_health_and_the_page_answer(demo_pair: Pair) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    with serving(demo_pair, access=Access("127.0.0.1", key=KEY)) as served:
        for path in ("/v1/models", "/docs", "/openapi.json", "//", "/x/.."):
            assert served.ask(path)[0] == 401
        assert served.ask("/health")[0] == 200
        status, _, page = served.ask("/")
        assert status == 200
        assert demo_pair.target.name not in page
        for given in ("", KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}", "Bearer \xff"):
            status, _, answer = served.ask("/v1/completions", body, {"Authorization": given})
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for given in (f"Bearer {KEY}", f"bearer  {KEY}"):
            assert served.ask("/v1/completions", body, {"Authorization": given})[0] == 200
        base = f"{served.address}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:9", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("my-machine.local:8080", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.7", 403),
        ("127.0.0.1@evil.example", 403),
        ("", 403),
    ],
)
def test_the_name_of_the_server_is_checked(demo_pair: Pair, host: str, status: int) -> None:
    access = Access("127.0.0.1", hosts=frozenset({"my-machine.local"}))
    with serving(demo_pair, access=access) as served:
        assert served.ask("/health", headers={"Host": host})[0] == status


def test_beyond_this_machine_addresses_are_names_too() -> None:
    def check(host: str) -> None:
        scope = {"method": "GET", "path": "/", "headers": [(b"host", host.encode())]}
        Access("0.0.0.0").check(scope, {})

    check("192.168.0.7:80")
    check("[fe80::1]")
    with pytest.raises(ApiError):
        check("evil.example")


def test_pages_from_elsewhere_are_refused(demo_pair: Pair) -> None:
    access = Access("127.0.0.1", origins=frozenset({"https://good.example"}), key=KEY)
    bearer = {"Authorization": f"Bearer {KEY}"}
    with serving(demo_pair, access=access) as served:
        for origin in ("https://evil.example", "null", "http://good.example", "https://good"):
            headers = {**bearer, "Origin": origin}
            status, found, answer = served.ask("/v1/models", headers=headers)
            assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in found
            assert served.ask("/v1/models", headers=headers, method="OPTIONS")[0] == 403
        assert served.ask("/v1/models", headers={**bearer, "Origin": served.address})[0] == 200

        headers = {"Origin": "https://good.example"}
        status, found, _ = served.ask("/v1/models", headers=headers, method="OPTIONS")
        assert (status, found["access-control-allow-origin"]) == (204, "https://good.example")
        status, found, _ = served.ask("/v1/models", headers={**bearer, **headers})
        assert (status, found["access-control-allow-origin"]) == (200, "https://good.example")
        assert served.ask("/v1/models", headers=headers)[0] == 401


def test_a_second_origin_is_not_hidden_behind_the_servers_own() -> None:
    own = [(b"host", b"127.0.0.1:80"), (b"origin", b"http://127.0.0.1:80")]
    scope = {"method": "GET", "path": "/", "headers": own}
    Access("127.0.0.1").check(scope, {})
    more = {**scope, "headers": [*own, (b"origin", b"https://evil.example")]}
    with pytest.raises(ApiError, match="origin"):
        Access("127.0.0.1").check(more, {})


def test_only_json_of_a_bounded_size_is_read(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        assert served.ask("/v1/completions", body, {"Content-Type": kind})[0] == 415
    typed = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.ask("/v1/completions", body, typed)[0] == 200
    assert served.ask("/v1/completions", body, {"Content-Encoding": "gzip"})[0] == 415
    large = {**body, "padding": "x" * (16 << 20)}
    status, _, answer = served.ask("/v1/completions", large)
    assert (status, answer["error"]["code"]) == (413, "too_large")
    pieces = [b" " * (1 << 20)] * 16
    status, answer = sent_in_pieces(served, [*pieces, b"{"])
    assert (status, answer["error"]["code"]) == (413, "too_large"), "without a length too"
    large = {**body, "padding": "x" * ((16 << 20) - 200)}
    assert served.ask("/v1/completions", large)[0] == 200


def sent_in_pieces(served: Served, pieces: list[bytes]) -> tuple[int, Any]:
    """The status and the JSON of the answer to a body whose length no header tells."""
    connection = http.client.HTTPConnection(urlsplit(served.address).netloc, timeout=60)
    try:
        connection.request("POST", "/v1/completions", iter(pieces), JSON, encode_chunked=True)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 lets other machines in, and there is no key"),
        ("--host ::", "--host :: lets other machines in"),
        ("--host nowhere.invalid", "--host nowhere.invalid is no address of this machine"),
        ("--port 99999", "--port"),
        ("--port -1", "--port"),
        ("--queue -1", "--queue"),
        ("--api-key=", "the key is empty"),
        ("--api-key é", "the key is empty or has characters"),
        ("--allow-origin *", "--allow-origin is '*'"),
        ("--allow-host a/b", "--allow-host is 'a/b'"),
        ("--temperature -1", "temperature"),
        ("-m svib", "svib"),
        ("-m joint --temperature 1", "joint decodes greedily only"),
    ],
)
def test_wrong_options_are_one_line(
    words: str, line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECGEN_API_KEY", raising=False)
    code, out, err = run_main(monkeypatch, capfd, "serve", *words.split())
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(
    served: Served, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = served.address.rpartition(":")[2]
    code, _, err = run_main(monkeypatch, capfd, "serve", "--port", port)
    assert code == 2
    assert err.startswith(f"error: cannot listen at 127.0.0.1, port {port}: ")


# log-probabilities and predictions


def expected_log_probs(demo_pair: Pair, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = demo_pair.target.transformers_module(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_a_completion(
    client: openai.OpenAI, demo_pair: Pair, streamed: bool
) -> None:
    answer: Any = client.completions.create(
        model=model(client), prompt=PROMPT, max_tokens=30, logprobs=2, stream=streamed
    )
    given = [chunk.choices[0] for chunk in answer if chunk.choices] if streamed else answer.choices
    lists = [choice.logprobs for choice in given if choice.logprobs is not None]
    text = "".join(choice.text for choice in given)
    ids = demo_pair.generate(PROMPT, "ar", max_new_tokens=30).token_ids
    expected = expected_log_probs(demo_pair, demo_pair.tokenizer.encode(PROMPT), ids)
    found = [value for part in lists for value in part.token_logprobs]
    assert found == pytest.approx(
        [float(expected[row, id_]) for row, id_ in enumerate(ids)], abs=1e-3
    )
    tokens = [token for part in lists for token in part.tokens]
    offsets = [offset for part in lists for offset in part.text_offset]
    assert "".join(tokens) == text
    assert all(text.startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
    for token, top in zip(
        tokens, (top for part in lists for top in part.top_logprobs), strict=True
    ):
        assert token in top
        assert 2 <= len(top) <= 3


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_a_conversation_end_with_its_text(
    client: openai.OpenAI, demo_pair: Pair, streamed: bool
) -> None:
    answer: Any = client.chat.completions.create(
        model=model(client), messages=MESSAGES, logprobs=True, top_logprobs=4, stream=streamed
    )
    given = [chunk.choices[0] for chunk in answer] if streamed else answer.choices
    parts = [choice.delta if streamed else choice.message for choice in given]
    text = "".join(part.content or "" for part in parts)
    entries = [entry for choice in given if choice.logprobs for entry in choice.logprobs.content]
    assert "".join(entry.token for entry in entries) == text
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text
    assert all(len(entry.top_logprobs) == 4 for entry in entries)
    first = entries[0]
    assert first.top_logprobs[0].logprob == first.logprob, "greedy"


def test_characters_of_several_tokens_have_all_their_bytes(served: Served, demo_pair: Pair) -> None:
    body = {"prompt": "Löwe: 🦁🦁🦁🦁", "max_tokens": 24, "temperature": 2, "seed": 4}
    chat = {"messages": [{"role": "user", "content": body.pop("prompt")}], "logprobs": True, **body}
    _, _, answer = served.ask("/v1/chat/completions", chat)
    choice = answer["choices"][0]
    spelled = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert spelled.decode(errors="replace") == choice["message"]["content"]


def test_a_prediction_is_drafted_and_changes_nothing(served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 60, "specgen": {"rounds": True}}
    _, _, plain = served.ask("/v1/chat/completions", body)
    text = plain["choices"][0]["message"]["content"]
    for content in (text, text.replace("e", "a"), [{"type": "text", "text": text}]):
        given = {**body, "prediction": {"type": "content", "content": content}}
        _, _, answer = served.ask("/v1/chat/completions", given)
        assert answer["choices"][0]["message"]["content"] == text
    passes = [answer["specgen"]["summary"]["target_passes"] for answer in (plain, answer)]
    assert passes[1] < passes[0]
    reasons = [round_["stop_reason"] or "" for round_ in answer["specgen"]["rounds"]]
    assert any("prediction" in reason for reason in reasons)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 3


@pytest.mark.parametrize("method", ["eagle", "medusa", "glide", "block", "eesd"])
def test_trained_heads_draft_predictions_and_several_answers(demo_pair: Pair, method: str) -> None:
    question: Any = [{"role": "user", "content": "Tell me about the sea."}]
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0)
    seeds = [7, 8, 9]
    expected = [demo_pair.generate(question, method, sampling, seed=seed).text for seed in seeds]
    body = {"messages": question, "max_tokens": 24, "specgen": {"rounds": True}}
    with serving(demo_pair, method) as served:
        sampled = {**body, "temperature": 1.0, "seed": 7, "n": 3}
        _, _, several = served.ask("/v1/chat/completions", sampled)
        _, _, plain = served.ask("/v1/chat/completions", body)
        text = plain["choices"][0]["message"]["content"]
        given = {**body, "prediction": {"type": "content", "content": text}}
        _, _, predicted = served.ask("/v1/chat/completions", given)
    assert [choice["message"]["content"] for choice in several["choices"]] == expected
    assert text == demo_pair.generate(question, "ar", max_new_tokens=24).text
    assert predicted["choices"][0]["message"]["content"] == text
    passes = [answer["specgen"]["summary"]["target_passes"] for answer in (plain, predicted)]
    assert passes[1] < passes[0]


def test_penalties_of_a_request(served: Served, demo_pair: Pair) -> None:
    penalties = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    body = {"prompt": PROMPT, "max_tokens": 30, **penalties}
    _, _, answer = served.ask("/v1/completions", body)
    expected = demo_pair.generate(PROMPT, "ar", max_new_tokens=30, **penalties)
    assert answer["choices"][0]["text"] == expected.text
    assert expected.text != demo_pair.generate(PROMPT, "ar", max_new_tokens=30).text


def test_clients_see_the_last_part_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stored").mkdir()
    (tmp_path / "named").symlink_to("stored")
    monkeypatch.chdir(tmp_path / "stored")
    assert public_name(str(tmp_path / "named")) == "named"
    assert public_name(".") == "stored"
    assert public_name("owner/model") == "owner/model"
