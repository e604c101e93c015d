"""`generate --prompts`: one load, an answer for each prompt, continued after an interruption;
several prompts from Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import SUMMARY, parsed, run_main

import specgen
from specgen.pair import loading
from specgen.pair.pair import Pair

PROMPTS = [
    {"prompt": "abc", "id": "one"},
    {"prompt": "the cat", "tuning": True},
    {"turns": ["hello", "and?"], "category": "talk"},
]
Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pair: tuple[str, ...],
    prompts: Path,
) -> Generate:
    """Runs `specgen generate` on the tiny pair and the file of prompts: exit code, stdout,
    stderr."""
    usual = ("generate", *pair, "-m", "sd", "-n", "9", "--ignore-eos", "--prompts", str(prompts))
    return lambda *more: run_main(monkeypatch, capfd, *usual, *more)


def test_each_prompt_gets_one_line_of_json_after_one_load(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load = loading.load_pair
    monkeypatch.setattr(
        loading, "load_pair", lambda *given, **more: loads.append(1) or load(*given, **more)
    )
    code, out, err = generate("--json")
    lines = parsed(out)
    assert (code, loads, [line["prompt_index"] for line in lines]) == (0, [1], [0, 1, 2])
    assert [(line["prompt_name"], line["category"]) for line in lines] == [
        ("one", "other"),
        ("", "other"),
        ("", "talk"),
    ]
    assert all(set(SUMMARY.split()) <= set(line) for line in lines)
    assert [line["new_tokens"] for line in lines] == [9, 9, 9]
    assert "1 later turn left out" in err
    assert "stopped at" not in err, "no footers"


def test_without_json_the_answers_are_text_and_the_rest_is_elsewhere(generate: Generate) -> None:
    texts = [line["text"] for line in parsed(generate("--json")[1])]
    code, out, err = generate()
    assert (code, out) == (0, "".join(f"{text}\n" for text in texts))
    assert "prompt 1 of 3: one\n" in err
    assert err.count("stopped at 9 tokens (-n)") == 3
    assert generate("-q")[2] == ""


def test_chat_formats_each_prompt(generate: Generate, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert generate("--chat", "--system", "be brief", "--json", "--trace", str(trace))[0] == 0
    starts = [line for line in parsed(trace.read_text(encoding="utf-8")) if line["type"] == "start"]
    assert [start["prompt_text"].splitlines()[:2] for start in starts] == [
        ["system be brief", f"user {text}"] for text in ("abc", "the cat", "hello")
    ]


def test_the_same_command_continues_where_it_was_interrupted(
    generate: Generate, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ("--json", "--trace", str(trace), "--temperature", "1")
    _, whole, _ = generate(*options)
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    ends = [
        number
        for number, line in enumerate(lines, start=1)
        if line.startswith('{"type": "summary"')
    ]
    for kept, interrupted in ((ends[1], False), (ends[1] + 2, False), (ends[2], True)):
        cut = "".join(lines[:kept])
        cut = (
            cut.replace('"finish_reason": "length"', '"finish_reason": "interrupted"')
            if interrupted
            else cut
        )
        trace.write_text(
            cut.replace("interrupted", "length", 2) if interrupted else cut, encoding="utf-8"
        )
        code, out, err = generate(*options)
        assert (code, len(parsed(out)), out.splitlines()[:2]) == (0, 3, whole.splitlines()[:2]), (
            "random texts, made once"
        )
        assert f"continuing {trace}, which has 2 answers" in err
        runs = [
            line for line in parsed(trace.read_text(encoding="utf-8")) if line["type"] == "summary"
        ]
        assert [run["prompt_index"] for run in runs] == [0, 1, 2]
        assert {run["finish_reason"] for run in runs} == {"length"}


@pytest.mark.parametrize("changed", [["-n", "8"], ["-m", "ar"], ["--set", "k=2"], ["--chat"]])
def test_another_commands_trace_is_kept(
    generate: Generate, tmp_path: Path, changed: list[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    generate("--trace", str(trace))
    whole = trace.read_text(encoding="utf-8")
    cut = "".join(whole.splitlines(keepends=True)[:-1])
    for text, finished, kind in ((cut, 2, "an interrupted run"), (whole, 3, "a run")):
        trace.write_text(text, encoding="utf-8")
        code, out, err = generate("--json", "--trace", str(trace), *changed)
        assert (code, out, trace.read_text(encoding="utf-8")) == (2, "", text)
        assert (
            f"the trace {trace} holds {kind} of other prompts or options (sd, {finished} finished "
            "answers), which would be lost. Name"
        ) in err


def test_the_same_commands_finished_trace_is_written_anew(
    generate: Generate, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    generate("--trace", str(trace))
    _, out, err = generate("--json", "--trace", str(trace))
    assert f"{trace} is written anew" in err
    assert "continuing" not in err
    assert len(parsed(out)) == 3
    assert sum(line["type"] == "start" for line in parsed(trace.read_text(encoding="utf-8"))) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", "other"),
        ("device", "cuda:0"),
        ("dtype", "bfloat16"),
        ("versions", {"arithmetic": "0"}),
    ],
)
def test_answers_of_another_model_or_arithmetic_are_not_continued(
    generate: Generate, tmp_path: Path, key: str, value: object
) -> None:
    trace = tmp_path / "trace.jsonl"
    generate("--trace", str(trace))
    lines = parsed(trace.read_text(encoding="utf-8"))[:-1]
    for line in lines:
        if line["type"] == "start":
            line[key] = {**line[key], **value} if isinstance(value, dict) else value
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    code, _, err = generate("--json", "--trace", str(trace))
    assert code == 2
    assert "interrupted run of other prompts or options (sd, 2 finished answers)" in err


def test_a_file_with_only_the_first_prompts_does_not_overwrite_an_interrupted_run(
    generate: Generate, tmp_path: Path, prompts: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    generate("--trace", str(trace))
    cut = "".join(trace.read_text(encoding="utf-8").splitlines(keepends=True)[:-1])
    trace.write_text(cut, encoding="utf-8")
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n")
    code, _, _ = generate("--trace", str(trace))
    assert (code, trace.read_text(encoding="utf-8")) == (2, cut)


def test_a_run_that_was_interrupted_in_its_first_answer_begins_again(
    generate: Generate, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    generate("--trace", str(trace))
    trace.write_text(trace.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    code, out, _ = generate("--json", "--trace", str(trace))
    assert (code, len(parsed(out))) == (0, 3)


def test_an_interruption_says_how_to_continue(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = specgen.cli.output_writers.OutputWriter._add  # type: ignore[attr-defined]
    rounds = []

    def press(self: object, round_: object) -> None:
        rounds.append(round_)
        add(self, round_)
        if sum(each.index == 0 for each in rounds) == 2:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    monkeypatch.setattr("specgen.cli.output_writers.OutputWriter._add", press)
    trace = ("--trace", str(tmp_path / "trace.jsonl"))
    for options, words in (
        (trace, "; the same command continues it."),
        ((), "; with --trace FILE.jsonl the same command"),
    ):
        rounds.clear()
        code, out, err = generate("--json", *options)
        assert (code, [line["finish_reason"] for line in parsed(out)]) == (
            130,
            ["length", "interrupted"],
        )
        assert f"Interrupted after 1 of 3 prompts{words}" in err


def test_a_prompt_beside_the_file_and_one_that_is_too_long_are_refused(
    generate: Generate, prompts: Path
) -> None:
    assert generate("hello")[0] == 2
    code, _, err = generate("-f", str(prompts))
    assert (code, "Leave one of them out" in err) == (2, True)
    prompts.write_text(json.dumps({"prompt": "the cat " * 900, "id": "long"}) + "\n")
    code, out, err = generate("--json")
    assert (code, out) == (2, "")
    assert "prompt 0 (long): the prompt is too long" in err


def test_a_file_of_prompts_is_named_where_it_is_taken_for_something_else(
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pair: tuple[str, ...],
    prompts: Path,
) -> None:
    code, _, err = run_main(monkeypatch, capfd, "generate", *pair, "-n", "2", "-f", str(prompts))
    assert code == 0
    assert f"--prompts {prompts} answers each of its prompts" in err
    code, _, err = run_main(monkeypatch, capfd, "inspect", str(prompts))
    assert code == 2
    assert (
        f"{prompts} holds prompts and is no trace. Answer them with specgen generate "
        f"--prompts {prompts}"
    ) in err


def test_python_takes_several_prompts(demo_pair: Pair) -> None:
    sampling = specgen.SamplingParams(max_new_tokens=6)
    texts = ["def add(a, b):", "def mean(numbers):"]
    one_by_one = [demo_pair.generate(text, "svip", sampling).token_ids for text in texts]
    ids = [demo_pair.tokenizer.encode(text) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    for given in (texts, tuple(texts), ids):
        assert [
            result.token_ids for result in demo_pair.generate(given, "svip", sampling)
        ] == one_by_one  # type: ignore[call-overload]
    assert len(demo_pair.generate(chats, "svip", sampling)) == 2
    assert demo_pair.generate(ids[0], "svip", sampling).token_ids == one_by_one[0]
    assert isinstance(demo_pair.generate(chats[0], "svip", sampling), specgen.Result)
    for wrong in ([], ["text", 5], ["text", ""], [[]]):
        with pytest.raises(specgen.SpecgenError, match=r"the prompt is (empty|5)"):
            demo_pair.generate(wrong, "svip", sampling)
    with pytest.raises(specgen.SpecgenError, match=r"pair\.generate takes several prompts"):
        demo_pair.rounds(texts, "svip", sampling)  # type: ignore[arg-type]
