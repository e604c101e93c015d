"""Log-probabilities of an answer's tokens: in traces and JSON lines, as a table, and without a pass
of their own. That they are those of transformers is in `test_predicted_output.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import parsed, run_main

import specgen
from specgen.base.grammars import Grammar
from specgen.pair.pair import Pair

PROMPT = "def fibonacci(n):"
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specgen.load() as loaded:
        yield loaded


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    return partial(run_main, monkeypatch, capfd)


def joined(lines: list[dict[str, Any]], key: str) -> list[Any]:
    """The values of a key of all rounds, one after the other."""
    return [value for line in lines if line["type"] == "round" for value in line[key]]


@pytest.mark.parametrize("method", ["svip", "lookup", "sd:width=3", "pearl:window=3"])
def test_json_lines_have_those_of_plain_decoding(invoke: Invoke, method: str) -> None:
    options = ("generate", "-n", "24", "--logprobs", "3", "--json", PROMPT)
    plain = parsed(invoke(*options, "-m", "ar")[1])
    found = parsed(invoke(*options, "-m", method)[1])
    assert len(joined(found, "log_probs")) == found[-1]["new_tokens"] == 24
    assert joined(found, "log_probs") == pytest.approx(joined(plain, "log_probs"), abs=1e-4)
    assert joined(found, "top_ids") == joined(plain, "top_ids")
    assert joined(found, "top_texts") == joined(plain, "top_texts")
    for ours, theirs in zip(
        joined(found, "top_log_probs"), joined(plain, "top_log_probs"), strict=True
    ):
        assert len(ours) == 3
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert "log_probs" not in parsed(invoke("generate", "-n", "2", "--json", PROMPT)[1])[1]


def test_a_table_follows_the_answer(invoke: Invoke) -> None:
    code, out, err = invoke("generate", "-n", "5", "--logprobs", "2", PROMPT)
    assert code == 0
    title, *rows = [line for line in err.splitlines() if line][1:-1]
    assert title.split() == ["token", "log", "p", "likeliest"]
    assert len(rows) == 5
    assert all(row[:16].strip(" ↵·") in out for row in rows)
    assert all(float(row[16:26]) <= 0 for row in rows)
    assert "likeliest" not in invoke("generate", "-n", "5", "--logprobs", "0", PROMPT)[2]


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (("compare", "--logprobs", "2", "--json"), "without --trace. Add --trace FILE.jsonl"),
        (("generate", "--logprobs", "2", "--prompts", "q.jsonl", "--json"), "Add --trace"),
        (("generate", "--json-schema", "", "x"), "--json-schema is empty"),
    ],
)
def test_what_would_be_lost_is_refused(
    arguments: tuple[str, ...], way_out: str, invoke: Invoke
) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert way_out in err


def test_traces_of_comparisons_have_them(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    options = ("-n", "6", "--limit", "1", "--repeats", "1", "--logprobs", "1")
    code, _, _ = invoke("compare", "-m", "sd", *options, "--trace", str(path))
    assert code == 0
    lines = parsed(path.read_text())
    tokens = sum(line["new_tokens"] for line in lines if line["type"] == "summary")
    assert len(joined(lines, "log_probs")) == len(joined(lines, "top_ids")) == tokens > 6
    assert invoke("inspect", str(path))[0] == 0


@pytest.mark.parametrize("method", ["ar", "svip", "sd:width=3", "lookahead"])
def test_they_take_no_pass_of_their_own(pair: Pair, method: str) -> None:
    runner = pair.models.plain().target
    passes = []
    for wanted in (None, 5):
        pair.forget()
        before = runner.forward_count  # type: ignore[attr-defined]
        pair.generate(PROMPT, method, max_new_tokens=24, seed=0, logprobs=wanted)
        passes.append(runner.forward_count - before)  # type: ignore[attr-defined]
    assert passes[0] == passes[1] >= 3


def test_they_are_of_the_logits_before_a_grammar(pair: Pair) -> None:
    grammar = Grammar("regex", '[{]"(x|y)+"[}]')
    result = pair.generate(PROMPT, "sd", grammar=grammar, max_new_tokens=12, logprobs=0)
    found = [entry.log_prob for round_ in result.rounds for entry in round_.verdict.log_probs]
    prompt = pair.tokenizer.encode(PROMPT)
    assert min(found) < -3, "the model would write something else"
    assert sum(found) == pytest.approx(pair.log_likelihood(prompt, result.token_ids), abs=1e-3)
