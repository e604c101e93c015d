"""Outputs that keep to a grammar: the target's distribution among those that do, whatever drafts;
what may follow each path of tokens; grammars that cannot be used."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from cli_helpers import run_main
from published_model import draft_folder, gguf_file, needs_published_model
from pydantic import BaseModel, ConfigDict, Field
from serving import serving
from statistics_checks import Distribution
from test_request_penalties import PenalisedRunner
from tokenizer_helpers import FILES, load, write

import specgen
from specgen import demo
from specgen.base.errors import RunError, SpecgenError
from specgen.base.grammars import JSON_OBJECT, Grammar
from specgen.base.types import Context, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.forced_tokens import MOST_FORCED
from specgen.engine.forward_pass import chain_parents, path_to
from specgen.engine.text.grammar import GrammarCompiler, GrammarConstraint, check_grammar
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT as SHORT
from specgen.testing.enumeration import ROUNDING, Paths, SmallRunner, states, total_variation

PROMPT = "def fibonacci(n):"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "catfish"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar.of_schema(SCHEMA),
    JSON_OBJECT,
    Grammar("regex", "(ab|abc|b)*d{2,4}é?"),
    Grammar("grammar", 'root ::= "yes, " [a-c]+ | "no" | "yes" (" really")*'),
)
# of letters; some are the beginnings of others, and after an a there is no choice first
WORDS = ("abaa", "abab", "abb", "ba", "bbab", "b")
OF_WORDS = Grammar("regex", "|".join(WORDS))
END = 2  # the letter that stands for the end of a sequence


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specgen.load() as loaded:
        yield loaded


# the distribution


def constrained(target: SmallRunner, sampling: SamplingParams, ends: Sequence[int]) -> Distribution:
    """The distribution of the target's outputs that are one of `WORDS`, or where the limit cuts
    them its beginning, by definition: the tokens that no word has next are left out of each
    distribution."""
    found: Distribution = {}

    def go_on(tokens: tuple[int, ...], mass: float) -> None:
        text = "".join("abc"[token] for token in tokens)
        nexts = {
            "ab".index(word[len(text)]) for word in WORDS if word.startswith(text) != (word == text)
        }
        is_over = not nexts or tokens[-1:] == (END,) or len(tokens) == sampling.max_new_tokens
        if tokens and is_over:
            found[tokens] = found.get(tokens, 0.0) + mass
            return
        allowed = {*nexts, *(ends if text in WORDS else ())}
        row = SmallRunner.row(target, [*SHORT, *tokens]).clone()
        for token in range(len(row)):
            if token not in allowed:
                row[token] = -torch.inf
        for token, share in enumerate(token_sampling.warp(row, sampling).tolist()):
            if share:
                go_on((*tokens, token), mass * share)

    go_on((), 1.0)
    return found


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ar", {}),
        ("sd", {"k": 3}),
        ("sd", {"k": 2, "width": 2}),
        ("sd", {"k": 2, "cape": True}),
        ("lookup", {"k": 3, "ngram": 2}),
        ("pearl", {"window": 2}),
        ("specinfer", {"k": 2, "drafts": 2}),
        ("spectr", {"k": 2, "drafts": 2}),
        ("lookahead", {"window": 2, "ngram": 3, "guesses": 2}),
        ("ouroboros", {"k": 3, "window": 2, "ngram": 3, "branches": 1}),
        ("adaptive", {"draft_cost": 0.2, "verify_cost": 0.05}),
    ],
)
@pytest.mark.parametrize("ends", [(END,), ()])
def test_sampling_has_the_constrained_distribution(
    method: str, settings: dict[str, Any], ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = PenalisedRunner(0), PenalisedRunner(100)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.2, grammar=OF_WORDS)
    found = Paths(monkeypatch).of_rounds(
        lambda: states(method, settings, target, draft, sampling, ends)
    )
    wanted = constrained(target, sampling, ends)
    assert len(wanted) > 3
    assert total_variation(found, wanted) < ROUNDING


def test_sampling_with_penalties_and_filters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where top-k and penalties leave nothing that the grammar allows, something is left."""
    target, draft = PenalisedRunner(0), PenalisedRunner(100)
    sampling = SamplingParams(
        max_new_tokens=4, temperature=1.0, top_k=1, presence_penalty=1.5, grammar=OF_WORDS
    )
    found = Paths(monkeypatch).of_rounds(
        lambda: states("sd", {"k": 2}, target, draft, sampling, (END,))
    )
    plain = Paths(monkeypatch).of_rounds(lambda: states("ar", {}, target, draft, sampling, (END,)))
    assert total_variation(found, plain) < ROUNDING
    texts = ["".join("abc"[token] for token in tokens).removesuffix("c") for tokens in found]
    assert set(texts) <= {*WORDS}


# what may follow


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:20])
def test_what_may_follow_depends_on_the_tokens_alone(pair: Pair, grammar: Grammar) -> None:
    """A constraint that has followed many drafts, rolled back and gone on, allows what a new one
    does that follows the output token by token."""
    compiler = GrammarCompiler.of(pair.tokenizer)
    chance = random.Random(3)
    checked = 0
    for _ in range(4):
        context = Context([1, 2])
        constraint = compiler.constraint(grammar, {0})
        for _ in range(10):
            tokens, parents = _random_tree(constraint, context, chance)
            found = constraint.forbidden(context, tokens, parents, 0)
            for row, forbidden in enumerate(found):
                output = [*context.ids[2:], *path_to(tokens, parents, row - 1)]
                wanted = _token_by_token(compiler.constraint(grammar, {0}), output)
                if wanted is not None:
                    assert torch.equal(forbidden, wanted)
                    checked += 1
            choices = (~found[0]).nonzero()[:, 0].tolist()
            token = chance.choice(choices)
            if token == 0:
                break
            context.extend([token])
            if constraint.is_complete(context, []):
                break
    assert checked > 10


def _random_tree(
    constraint: GrammarConstraint, context: Context, chance: random.Random
) -> tuple[list[int], list[int]]:
    """A draft of tokens that are allowed where they are, and of some that are not."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(chance.randint(0, 5)):
        parent = chance.randint(-1, len(tokens) - 1)
        row = constraint.forbidden(context, tokens, parents, parent + 1)[0]
        choices = (~row).nonzero()[:, 0].tolist()
        is_allowed = chance.random() < 0.8
        tokens.append(chance.choice(choices) if is_allowed else chance.randrange(len(row)))
        parents.append(parent)
    return tokens, parents


def _token_by_token(constraint: GrammarConstraint, output: Sequence[int]) -> torch.Tensor | None:
    """What is forbidden after the output, as in plain decoding; None if it has ended, or leaves the
    grammar."""
    context = Context([1])
    for token in output:
        if token == 0 or constraint.forbidden(context, [], [], 0)[0][token]:
            return None
        context.extend([token])
    return constraint.forbidden(context, [], [], 0)[0]


def test_a_text_of_the_grammar_may_be_written_and_no_other(pair: Pair) -> None:
    compiler = GrammarCompiler.of(pair.tokenizer)
    constraint = compiler.constraint(Grammar.of_schema(SCHEMA), {0})
    context = Context([1])
    ids = pair.tokenizer.encode_after("\n", '{"name": "Bob", "age": 31, "kind": "catfish"}')
    rows = constraint.forbidden(context, ids, chain_parents(len(ids)), 0)
    assert not rows[range(len(ids)), ids].any()
    assert not rows[-1, 0]
    assert rows[:-1, 0].all(), "the end is forbidden before it is complete"
    assert rows[-1].sum() == rows.shape[1] - 1
    assert constraint.is_complete(context, ids)
    assert not constraint.is_complete(context, ids[:-1])
    assert not constraint.can_end(context)
    context.extend(ids)
    assert constraint.can_end(context)


@pytest.mark.parametrize("kind", FILES)
def test_tokenizers_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """With tokens for single bytes, and with a mark in place of a space: whichever allowed tokens
    come, the text matches, and a token that has to follow is the only one allowed."""
    tokenizer = load(write(tmp_path, FILES[kind](), None, {}))
    prompt = tokenizer.encode("a word")
    compiler = GrammarCompiler.of(tokenizer)
    chance = random.Random(5)
    pattern = "[é-ü€]{2}x? (the word|wo*|€ )end"
    for _ in range(6):
        context = Context(prompt)
        constraint = compiler.constraint(Grammar("regex", pattern), set())
        while not constraint.is_complete(context, []):
            allowed = (~constraint.forbidden(context, [], [], 0)[0]).nonzero()[:, 0].tolist()
            forced = constraint.forced(context)
            assert forced[:1] in ([], allowed)
            assert not any(tokenizer.is_special(token) for token in allowed[:20])
            context.extend([chance.choice(allowed)])
        detokenizer = tokenizer.detokenizer(prompt)
        text = "".join(detokenizer.push(token) for token in context.ids[len(prompt) :])
        assert re.fullmatch(pattern, text + detokenizer.flush())


def test_what_may_follow_a_path_of_many_tokens(pair: Pair) -> None:
    chance = random.Random(1)
    text = "".join(chance.choices("abcdefgh", k=2000))
    constraint = GrammarCompiler.of(pair.tokenizer).constraint(Grammar("regex", text + "x*"), {0})
    context = Context([1])
    path = constraint.forced(context)
    assert len(path) > sys.getrecursionlimit()
    rows = constraint.forbidden(context, path, chain_parents(len(path)), len(path))
    assert not rows[0, 0], "the text may end"
    assert not constraint.can_end(context)


def test_an_output_that_left_the_grammar_is_an_error(pair: Pair) -> None:
    constraint = GrammarCompiler.of(pair.tokenizer).constraint(Grammar("regex", "a+b"), {0})
    context = Context([1])
    context.extend(pair.tokenizer.encode_after("\n", "x"))
    with pytest.raises(RunError, match="no token can continue it"):
        constraint.forbidden(context, [], [], 0)


# runs of the bundled pair

METHODS = """
    sd svip beta-ts adaptive lookup suffix lookahead ouroboros pearl:window=3 spectr sd:width=3
    sd:cape=true eesd eesd-tree selfsd:skip=2 medusa eagle glide block
    """.split()  # noqa: SIM905


@pytest.fixture(scope="module")
def sampling() -> SamplingParams:
    return SamplingParams(max_new_tokens=60, grammar=Grammar.of_schema(SCHEMA))


@pytest.fixture(scope="module")
def plain(pair: Pair, sampling: SamplingParams) -> list[int]:
    """The ids of constrained greedy decoding by definition: the likeliest token that is allowed."""
    constraint = GrammarCompiler.of(pair.tokenizer).constraint(
        Grammar.of_schema(SCHEMA), pair.target.eos_ids
    )
    prompt = pair.tokenizer.encode(PROMPT)
    context = Context(prompt)
    while not constraint.is_complete(context, []):
        with torch.no_grad():
            ids = torch.tensor([context.ids])
            row = pair.target.transformers_module(ids).logits[0, -1].float()
        row[constraint.forbidden(context, [], [], 0)[0]] = -torch.inf
        context.extend([int(row.argmax())])
    return context.ids[len(prompt) :]


def test_plain_decoding_is_constrained(
    pair: Pair, sampling: SamplingParams, plain: list[int]
) -> None:
    result = pair.generate(PROMPT, "ar", sampling)
    assert result.token_ids == plain
    assert result.summary["finish_reason"] == "stop"
    assert set(json.loads(result.text)) == {"name", "age", "kind"}


@pytest.mark.parametrize("method", METHODS)
def test_greedy_ids_are_those_of_plain_decoding(
    pair: Pair, sampling: SamplingParams, plain: list[int], method: str
) -> None:
    result = pair.generate(PROMPT, method, sampling)
    assert result.token_ids == plain
    assert result.summary["finish_reason"] == "stop"


@pytest.mark.parametrize("method", ["mtad", "bild", "fly", "joint"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_methods_keep_to_the_grammar(pair: Pair, method: str, temperature: float) -> None:
    if method in ("joint", "fly") and temperature:
        pytest.skip("it decodes greedily only")
    sampling = SamplingParams(60, temperature, seed=1, grammar=Grammar.of_schema(SCHEMA))
    assert set(json.loads(pair.generate(PROMPT, method, sampling).text)) == set(
        SCHEMA["properties"]
    )


@pytest.mark.parametrize("method", ["sd:k=3", "sd:k=2:width=2", "pearl:window=3"])
def test_drafts_keep_to_the_grammar(method: str) -> None:
    """The draft's logits are masked as the target's are, in a process of its own too: a model that
    drafts for itself has every draft accepted."""
    folder = str(demo.folder("target"))
    sampling = SamplingParams(max_new_tokens=40, grammar=Grammar.of_schema(SCHEMA))
    with specgen.load(folder, folder, dtype="float32") as twins:
        rounds = twins.generate(PROMPT, method, sampling).rounds
    judged = [round_ for round_ in rounds if round_.draft.tokens]
    assert len(judged) > 3
    assert not [round_ for round_ in judged if round_.verdict.source == "correction"]


@pytest.mark.parametrize(
    "method",
    """sd:k=3 sd:k=3:cape=true sd:width=3 specinfer svip suffix adaptive pearl:window=3
    pearl:window=3:post_verify=false eagle""".split(),  # noqa: SIM905
)
def test_tokens_that_have_to_follow_are_drafted_without_a_model(
    pair: Pair, sampling: SamplingParams, plain: list[int], method: str
) -> None:
    """They save passes of the target, and none of them is rejected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarConstraint, "forced", lambda *_: [])
        without = pair.generate(PROMPT, method, sampling)
    result = pair.generate(PROMPT, method, sampling)
    assert result.token_ids == without.token_ids == plain
    assert result.summary["rounds"] < without.summary["rounds"]
    forced = [round_ for round_ in result.rounds if "forced" in (round_.draft.stop_reason or "")]
    assert forced
    for round_ in result.rounds[:-1]:
        followed = {-1, *round_.verdict.path}
        rejected = {
            node
            for node, parent in enumerate(round_.draft.parents)
            if parent in followed and node not in followed
        }
        assert not rejected & round_.draft.forced
    whole = [round_ for round_ in forced if round_.draft.stop_reason.startswith("forced")]
    assert all(len(round_.verdict.path) == len(round_.draft.tokens) for round_ in whole)
    assert not any("forced" in (round_.draft.stop_reason or "") for round_ in without.rounds)


def test_the_draft_model_runs_for_no_token_that_has_to_follow(pair: Pair) -> None:
    grammar = Grammar("regex", "The answer to all of your questions is (yes|no)[.]")
    runners = pair.models.with_draft_model()
    assert runners is not None
    assert runners.draft is not None
    before = runners.draft.forward_count  # type: ignore[attr-defined]
    result = pair.generate(PROMPT, "sd:k=2", grammar=grammar, max_new_tokens=40)
    passes = runners.draft.forward_count - before  # type: ignore[attr-defined]
    assert result.summary["rounds"] <= 4
    assert passes <= 4 < len(result.token_ids)


@pytest.mark.parametrize("method", ["sd:k=2", "lookup:k=2"])
def test_a_long_text_that_has_to_follow_is_drafted_in_parts(pair: Pair, method: str) -> None:
    """Each drafted token is a row of the target's logits."""
    grammar = Grammar("regex", "Some of it. " * 5 + "(no|yes)" + ", and that is all of it" * 20)
    result = pair.generate(PROMPT, method, grammar=grammar, max_new_tokens=400)
    assert max(len(round_.draft.forced) for round_ in result.rounds) <= MOST_FORCED
    assert (
        MOST_FORCED <= max(len(round_.draft.tokens) for round_ in result.rounds) <= MOST_FORCED + 2
    )
    plain = pair.generate(PROMPT, "ar", grammar=grammar, max_new_tokens=400)
    assert result.token_ids == plain.token_ids


def test_the_length_policy_sees_no_token_that_has_to_follow(pair: Pair) -> None:
    seen = list[tuple[int, int]]()
    request = pair.request(PROMPT, "sd:k=2", grammar=Grammar.of_schema(SCHEMA), max_new_tokens=60)
    run = pair.run(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.policy, "observe", lambda *counts: seen.append(counts), raising=False)
        rounds = list(run.rounds())
    assert max(len(round_.draft.tokens) for round_ in rounds) > 2
    assert max(drafted for drafted, _ in seen) == 2
    assert all(accepted <= drafted for drafted, accepted in seen)


def test_stop_texts_end_a_constrained_answer(pair: Pair, sampling: SamplingParams) -> None:
    stopped = pair.generate(PROMPT, "svip", sampling, stop='"age"')
    assert stopped.text.endswith('", ')
    assert stopped.summary["finish_reason"] == "stop"


def test_a_text_that_may_go_on_ends_with_the_models_own_end(pair: Pair) -> None:
    grammar = Grammar("regex", "[a-z ]{1,40}[.]( [a-z]+[.])*")
    for method in ("ar", "sd", "pearl:window=2"):
        result = pair.generate(PROMPT, method, grammar=grammar, max_new_tokens=100)
        is_eos = result.token_ids[-1] in pair.target.eos_ids
        assert (result.summary["finish_reason"] == "eos") == is_eos


# the published model


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=24)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=24)


ASKED = "Alice is a 34 year old teacher from Bristol. Write her name, age and city as JSON."


@needs_published_model
def test_answers_of_the_published_model_are_read_by_pydantic() -> None:
    messages = [{"role": "user", "content": ASKED}]
    schema = Grammar.of_schema(Person.model_json_schema())
    with specgen.load(str(gguf_file()), str(draft_folder())) as pair:
        sampling = SamplingParams(80, grammar=schema)
        plain, drafted = (pair.generate(messages, method, sampling) for method in ("ar", "sd:k=3"))
        sampled = pair.generate(messages, "suffix", sampling, temperature=1.0, seed=7)
    assert plain.token_ids == drafted.token_ids
    assert Person.model_validate_json(plain.text).name == "Alice"
    assert sampled.summary["finish_reason"] == "stop"
    Person.model_validate_json(sampled.text)


# the server


def test_openais_client_gets_what_it_asked_for(pair: Pair) -> None:
    described = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    messages: Any = [{"role": "user", "content": "Where does an eagle live?"}]
    expected = pair.generate(messages, "svip", grammar=Grammar.of_schema(SCHEMA), max_new_tokens=80)
    with (
        serving(pair) as served,
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client,
    ):
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=name, messages=messages, max_tokens=80, response_format=described
        )
        stream = client.chat.completions.create(
            model=name, messages=messages, max_tokens=80, response_format=described, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        short = client.chat.completions.create(
            model=name,
            messages=messages,
            max_tokens=1,
            response_format={"type": "json_object"},
        )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")
    assert set(json.loads(expected.text)) == set(SCHEMA["properties"])
    assert "".join(pieces) == expected.text
    assert short.choices[0].finish_reason == "length"
    assert str(short.choices[0].message.content).startswith("{")


# what cannot be used


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "a(?=b)"), "look-ahead"),
        (Grammar("regex", "a[^\\s\\S]"), "no output matches the regular expression"),
        (Grammar("regex", ""), "only an empty output matches"),
        (Grammar("grammar", "root ::= root"), "no output matches the grammar"),
        (Grammar("grammar", "start: nothing"), 'unknown name: "nothing"'),
        (Grammar("grammar", "((("), "Expected"),
        (Grammar("json_schema", "{]"), "JSON schema cannot be used"),
        (Grammar("json_schema", "[1]"), "it has to be a JSON object"),
        (Grammar.of_schema({"enum": []}), "Unsatisfiable schema"),
        (Grammar.of_schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        (Grammar.of_schema({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
    ],
    ids=lambda value: value.text if isinstance(value, Grammar) else "",
)
def test_a_grammar_that_cannot_be_used_is_one_line(
    pair: Pair, grammar: Grammar, problem: str
) -> None:
    with pytest.raises(SpecgenError, match=problem) as caught:
        pair.request(PROMPT, "sd", grammar=grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_grammars_of_the_wrong_type() -> None:
    wrong: Any = "yaml"
    with pytest.raises(SpecgenError, match="It is one of json_schema, regex, grammar"):
        Grammar(wrong, "a")
    wrong = {"type": "object"}
    with pytest.raises(SpecgenError, match="of_schema"):
        Grammar("json_schema", wrong)
    for value in ({"a", "b"}, math.nan, [Grammar]):
        with pytest.raises(SpecgenError, match="JSON cannot hold"):
            Grammar.of_schema({"enum": value})
    with pytest.raises(SpecgenError, match="grammar is"):
        SamplingParams(grammar=wrong)
    with pytest.raises(SpecgenError, match="ignore_eos"):
        SamplingParams(grammar=JSON_OBJECT, ignore_eos=True)
    check_grammar(Grammar("json_schema", "true"))


# the command line

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    return partial(run_main, monkeypatch, capfd)


def test_generate_answers_in_the_shape_that_is_asked_for(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    code, from_file, _ = invoke("generate", "--json-schema", str(path), PROMPT)
    assert code == 0
    assert set(json.loads(from_file)) == set(SCHEMA["properties"])
    code, from_text, err = invoke("generate", "--json-schema", json.dumps(SCHEMA), PROMPT)
    assert (code, from_text) == (0, from_file)
    assert "incomplete" not in err
    path.write_text('root ::= "yes" | "no"')
    code, out, _ = invoke("generate", "--grammar", str(path), PROMPT)
    assert (code, out.strip() in ("yes", "no")) == (0, True)
    code, out, _ = invoke("generate", "--regex", "[a-c]{3}x", PROMPT)
    assert (code, len(out.strip()), out.strip()[3:]) == (0, 4, "x")


def test_compare_measures_answers_of_a_shape(invoke: Invoke, tmp_path: Path) -> None:
    """All but transformers' own methods, and a trace of another shape is not continued."""
    trace = tmp_path / "trace.jsonl"
    options = ("--limit", "1", "--repeats", "1", "-n", "60", "--json")
    methods = "sd:k=3,transformers:dtype=float32"
    shape = ("--json-schema", json.dumps(SCHEMA))
    code, out, _ = invoke("compare", "-m", methods, *shape, *options, "--trace", str(trace))
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, [line["error"] is None for line in lines]) == (0, [True, True, False])
    assert lines[1]["identical"] == 1
    assert lines[2]["error"].startswith("transformers cannot keep its answers to a schema")
    recorded = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in recorded:
        if line["type"] == "summary":
            assert set(json.loads(line["text"])) == set(SCHEMA["properties"])

    code, out, err = invoke(
        "compare", "-m", "sd:k=3", "--regex", "[a-z]+", *options, "--resume", str(trace)
    )
    assert (code, out) == (2, "")
    assert "was made with another --json-schema, --regex or --grammar" in err


def test_an_answer_that_the_limit_cuts_is_said_to_be_incomplete(invoke: Invoke) -> None:
    """As a string that the model never closes."""
    options = ("generate", "-n", "12", "--regex", '"[a-z]{90}"')
    code, out, err = invoke(*options, PROMPT)
    assert (code, out[:1]) == (0, '"')
    assert "the answer is incomplete" in err
    code, out, _ = invoke(*options, "--json", PROMPT)
    assert json.loads(out.splitlines()[-1])["finish_reason"] == "length"


@pytest.mark.parametrize("command", ["compare", "serve"])
def test_other_commands_check_the_grammar_first(invoke: Invoke, command: str) -> None:
    code, out, err = invoke(command, "--regex", "(", "-t", "/nowhere")
    assert (code, out) == (2, "")
    assert "unclosed group" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--regex", "("), "unclosed group"),
        (("--regex", "a", "--json-schema", "{}"), "--json-schema and --regex are given"),
        (("--grammar", "/nowhere"), "cannot read the grammar /nowhere"),
        (("--json-schema", "/nowhere"), "cannot read the JSON schema /nowhere"),
        (("--json-schema", "{}", "--ignore-eos"), "--ignore-eos"),
    ],
)
def test_wrong_options_are_refused(invoke: Invoke, options: tuple[str, ...], problem: str) -> None:
    code, out, err = invoke("generate", *options, PROMPT)
    assert (code, out) == (2, "")
    assert problem in err
    assert len(err.strip().splitlines()) == 1
