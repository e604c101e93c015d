"""The command line when all is well, interrupted, or cut off: streams, records, round lines, a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import CONTEXT, LETTERS, make_tokenizer
from processes import Forked

from specgen.cli.app import main
from specgen.methods import METHODS

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs signals, pseudo-terminals and pipes of POSIX")
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
PROMPT = "the cat sat on the mat"

START = "type method settings lossless target draft device dtype prompt_ids sampling versions"
ROUND = (
    "type index mode draft_ids draft_texts parents accepted_ids token_id token_text source "
    "stop_reason entropies top_probs policy seconds"
)
SUMMARY = (
    "type method text token_ids new_tokens finish_reason seconds tokens_per_second rounds target_passes "
    "drafted accepted acceptance_rate draft_share harmonic_mean block_efficiency mean_accepted_run perplexity joules_per_token "
    "energy phase_seconds"
)
PHASES = {"prefill", "draft", "verify", "sample", "other"}

Lines = list[dict[str, Any]]
Generate = Callable[..., tuple[str, str]]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: tuple[str, ...]) -> Generate:
    """Run `specgen generate` on the tiny pair in this process: what it wrote to stdout and stderr."""

    def call(*arguments: str, models: tuple[str, ...] = pair) -> tuple[str, str]:
        return _call(monkeypatch, capfd, "generate", *models, "--device", "cpu", *arguments)

    return call


def _call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["specgen", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    captured = capfd.readouterr()
    return captured.out, captured.err


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """`specgen` in a process of its own, with pipes: from the interpreter's start on."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **options.pop("environment", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "specgen", *arguments], env=environment, **streams)


def run(*arguments: str, **options: Any) -> tuple[int, bytes, bytes]:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out or b"", err


def parsed(text: str) -> Lines:
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]


def check_record(lines: Lines) -> None:
    """The promised keys and no others; the rounds add up to the answer."""
    first, *rounds, last = lines
    assert (first["type"], last["type"]) == ("start", "summary")
    assert set(first) == set(START.split())
    assert set(last) == set(SUMMARY.split())
    assert set(last["phase_seconds"]) == PHASES
    for position, line in enumerate(rounds):
        assert line["type"] == "round"
        assert set(line) == set(ROUND.split())
        assert set(line["seconds"]) == PHASES
        assert line["index"] == position
        assert line["mode"] == ("sequential" if position else "prefill")
        assert len(line["draft_ids"]) == len(line["draft_texts"]) == len(line["parents"])
    own = ([line["token_id"]] if line["token_id"] is not None else [] for line in rounds)
    joined = [token for line, token_id in zip(rounds, own, strict=True) for token in (*line["accepted_ids"], *token_id)]
    assert joined == last["token_ids"]
    assert last["new_tokens"] == len(joined)
    assert last["rounds"] == last["target_passes"] == len(rounds)
    assert last["drafted"] == sum(len(line["draft_ids"]) for line in rounds)
    assert last["accepted"] == sum(len(line["accepted_ids"]) for line in rounds)


# ------------------------------------------------------------------ pipes, in processes of their own


@POSIX
def test_a_pipe_gets_the_text_alone_and_the_footer_goes_to_stderr() -> None:
    process = Forked("generate", "-n", "30", "def add(a, b):\n    return")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.endswith(b"\n")
    assert len(out) > 20
    assert b"\x1b" not in out + err
    assert re.fullmatch(r"svip  \d+ tokens  [\d.]+ tokens/s  \d+% accepted  .*verif.*", err.decode().strip())


def test_json_lines_have_the_promised_keys_and_are_the_same_in_the_trace(pair: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ("-n", "40", "--seed", "3", "--temperature", "1.5", "--ignore-eos", "--json", "--trace", str(trace))
    code, out, err = run("generate", *pair, *options, PROMPT, environment={"PYTHONIOENCODING": "ascii"})
    assert code == 0
    assert len(err.splitlines()) == 1
    assert out == trace.read_bytes()
    assert not out.isascii()  # UTF-8 whatever the locale
    lines = parsed(out.decode())
    check_record(lines)
    assert lines[0]["sampling"] == {
        "max_new_tokens": 40,
        "temperature": 1.5,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 3,
        "stop": [],
        "ignore_eos": True,
    }
    assert lines[-1]["finish_reason"] == "length"
    assert lines[-1]["new_tokens"] == 40


def test_recorded_distributions_stand_beside_each_drafted_token(generate: Generate, pair: tuple[str, ...]) -> None:
    options = ("-n", "20", "--ignore-eos", "-m", "sd", "--json", "-q")
    lines = parsed(generate(*options, "--record", "distributions", PROMPT)[0])
    for line in lines[1:-1]:
        assert set(line) == {*ROUND.split(), "overlap", "kl"}
        assert len(line["overlap"]) == len(line["kl"]) == len(line["draft_ids"])
        assert all(0 <= overlap <= 1 for overlap in line["overlap"])
        assert all(kl >= 0 for kl in line["kl"])
    assert any(line["overlap"] for line in lines[1:-1])
    plainly = parsed(generate(*options, PROMPT)[0])
    assert plainly[-1]["token_ids"] == lines[-1]["token_ids"]  # a record changes nothing
    code, _, err = run("generate", *pair, *options[:-2], "--record", "distributions", PROMPT)
    assert (code, b"--record distributions" in err) == (2, True)


@pytest.mark.slow
def test_a_character_that_the_locale_lacks_becomes_a_question_mark(pair: tuple[str, ...]) -> None:
    options = ("-n", "40", "--seed", "3", "--temperature", "1.5", "--ignore-eos", "-q")
    code, out, err = run("generate", *pair, *options, PROMPT, environment={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, b"")
    assert b"?" in out


@POSIX
def test_an_interruption_keeps_what_was_generated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ("-n", "900", "--ignore-eos", "--trace", str(trace), "def add(a, b):")
    process = Forked("generate", *arguments)
    seen = os.read(process.stdout.fileno(), 10)  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = parsed(trace.read_text(encoding="utf-8"))
    check_record(lines)
    assert lines[-1]["finish_reason"] == "interrupted"
    assert 1 <= lines[-1]["new_tokens"] < 900
    assert (seen + out).decode() == lines[-1]["text"].rstrip("\n") + "\n"
    assert err.strip().startswith(b"svip (interrupted)  ")
    assert b"Traceback" not in err


@POSIX
def test_an_interruption_while_loading_needs_no_traceback() -> None:
    process = start("generate", "hi", environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert process.stderr is not None
    while b"torch.nn.functional" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert all(line.startswith(b"import time:") for line in err.splitlines())


@POSIX
@pytest.mark.parametrize("form", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["text", "json"])
def test_a_reader_that_leaves_is_met_with_silence(form: tuple[str, ...]) -> None:
    process = Forked("generate", "-n", "900", "--ignore-eos", *form, "def add(a, b):")
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


@FULL
def test_a_full_disk_under_the_output_is_one_line(pair: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        process = Forked("generate", *pair, "-n", "5", PROMPT, stdout=full)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, b"error: cannot write the output: No space left on device\n")


@POSIX
def test_an_output_that_is_closed_is_no_error(pair: tuple[str, ...]) -> None:
    process = Forked("generate", "-q", "-n", "5", *pair, PROMPT, closed=True)
    assert process.communicate(timeout=120) == (b"", b"")
    assert process.returncode == 0


@POSIX
@pytest.mark.slow
def test_an_output_that_the_shell_closed_is_no_error(pair: tuple[str, ...]) -> None:
    command = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "specgen", "generate", "-q", "-n", "5", *pair, PROMPT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    before = os.times()
    code, out, err = run("--help")
    after = os.times()  # processor time: other tests run beside this one
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
    assert (code, err) == (0, b"")
    assert b"generate" in out
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub'}"
    check = f"import specgen.cli.app, sys; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=60, check=False)
    assert done.stderr.strip() == b""


def test_without_a_command_there_is_help_and_no_complaint() -> None:
    code, out, err = run()
    assert (code, err) == (2, b"")
    assert b"Usage" in out


# ------------------------------------------------------------------ text, options and notes, in this process


def test_the_answer_ends_before_a_stop_text(generate: Generate) -> None:
    whole, _ = generate("-n", "60", "--ignore-eos", PROMPT)
    position = next(n for n in range(20, 50) if whole[n : n + 3] not in whole[: n + 2])
    stop = whole[position : position + 3]
    out, _ = generate("-n", "60", "--ignore-eos", "--stop", "☃", "--stop", stop, PROMPT)
    assert out == whole[:position] + "\n"
    out, _ = generate("-n", "60", "--ignore-eos", "--stop", stop, "--json", PROMPT)
    lines = parsed(out)
    check_record(lines)
    assert lines[-1]["finish_reason"] == "stop"
    assert lines[-1]["text"] == whole[:position]


@pytest.mark.parametrize("system", [None, "be brief"])
def test_chat_puts_the_prompt_into_the_models_template(generate: Generate, system: str | None) -> None:
    out, _ = generate("-n", "2", "--json", "--chat", *(["--system", system] if system else []), "hello")
    text = (f"system {system}\n" if system else "") + "user hello\nassistant "
    assert parsed(out)[0]["prompt_ids"] == make_tokenizer(LETTERS)(text)["input_ids"]


@pytest.mark.parametrize(
    ("arguments", "data", "prompt"),
    [
        (["-"], b"abc", "abc"),
        ([], b"abc", "abc"),
        (["-"], b"abc\n", "abc"),
        ([], b"abc\r\n", "abc"),
        ([], b"abc\n\n", "abc\n"),
        ([], " é ".encode(), " é "),
        (["abc\n"], b"not read", "abc\n"),
    ],
    ids=["dash", "missing", "newline", "crlf", "one-newline-of-two", "spaces-kept", "argument-as-it-is"],
)
def test_the_prompt_is_the_argument_or_standard_input(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, arguments: list[str], data: bytes, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    out, _ = generate("-n", "2", "--json", *arguments)
    assert parsed(out)[0]["prompt_ids"] == make_tokenizer(LETTERS)(prompt)["input_ids"]


def test_quiet_leaves_stderr_empty(generate: Generate) -> None:
    loud, footer = generate("-n", "9", PROMPT)
    assert footer
    assert generate("-n", "9", "-q", PROMPT) == (loud, "")


def test_a_seed_repeats_sampled_output(generate: Generate) -> None:
    def sampled(seed: str) -> str:
        return generate("-n", "40", "--ignore-eos", "--temperature", "1", "--seed", seed, "-q", PROMPT)[0]

    assert sampled("1") == sampled("1") != sampled("2")


def test_without_a_draft_model_lookup_is_the_default_and_the_footer_says_so(generate: Generate, pair: tuple[str, ...]) -> None:
    _, footer = generate("-n", "20", PROMPT, models=pair[:2])
    assert footer.strip().startswith("lookup (no draft model)  ")
    out, _ = generate("-n", "20", "--json", PROMPT, models=pair[:2])
    assert parsed(out)[0]["draft"] is None


def test_plain_decoding_has_no_acceptance_to_speak_of(generate: Generate) -> None:
    out, footer = generate("-m", "ar", "-n", "5", "--ignore-eos", "--json", PROMPT)
    assert parsed(out)[-1]["acceptance_rate"] is None
    assert re.fullmatch(r"ar  5 tokens  [\d.]+ tokens/s\n", footer)


def test_the_footer_says_that_the_context_is_full(generate: Generate) -> None:
    out, footer = generate("-n", "500", "--ignore-eos", "--json", PROMPT)
    lines = parsed(out)
    assert len(lines[0]["prompt_ids"]) + lines[-1]["new_tokens"] == CONTEXT
    assert f"(the context of {CONTEXT} tokens is full)" in footer


def test_settings_reach_the_method(generate: Generate) -> None:
    out, _ = generate("-n", "20", "--ignore-eos", "--json", "-m", "sd", "--set", "policy=heuristic", "--set", "k=3", PROMPT)
    first, _, second, *_ = parsed(out)
    assert first["settings"] == {"policy": "heuristic", "k": 3, "max_draft": 40, "width": 1, "depth": "auto"}
    assert len(second["draft_ids"]) == 3


def test_help_method_describes_one_method(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = _call(monkeypatch, capfd, "generate", "--help-method", "-m", "svip")
    head, *settings = out.splitlines()
    assert head.startswith("svip  SVIP  lossless")
    assert [line.split("=")[0].strip() for line in settings] == ["threshold", "c", "max_draft"]


def test_inspect_lists_every_method_and_only_the_policies_that_it_can_take(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, err = _call(monkeypatch, capfd, "inspect", "--methods")
    assert err == ""
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in heads] == list(METHODS)
    assert all(method.paper in line for method, line in zip(METHODS.values(), heads, strict=True))
    lookup = out[out.index("\nlookup") : out.index("\npearl")]
    assert "beta-ts" in lookup
    assert "svip" not in lookup


# ------------------------------------------------------------------ round lines


@pytest.mark.parametrize("width", [100, 60])
def test_rounds_are_a_legend_a_line_each_and_then_the_answer(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    options = ("-m", "sd", "--set", "k=3", "-n", "40", "--ignore-eos", PROMPT)
    answer, _ = generate(*options)
    record = parsed(generate(*options, "--json")[0])
    out, err = generate(*options, "--rounds")
    assert out == answer
    *shown, blank, footer = err.rstrip("\n").splitlines()
    assert blank == ""
    assert footer.startswith("sd  40 tokens")
    assert err.count("✗rejected") == err.count("⊕bonus") == err.count("3/5 accepted of drafted") == 1
    rows = [line for line in shown if re.match(r" *\d+ .*", line) and "accepted of" not in line]
    assert [int(row[:3]) for row in rows] == list(range(record[-1]["rounds"]))
    assert f"prompt, {len(PROMPT)} tokens" in rows[0]
    for row, line in zip(rows[1:], record[2:-1], strict=True):
        assert row.split()[1] == f"{len(line['accepted_ids'])}/{len(line['draft_ids'])}"
        assert ("→" in row) == (line["source"] == "correction")
        assert ("⊕" in row) == (line["source"] == "bonus")
        if len(line["draft_ids"]) == 3:
            assert row.endswith("limit 3")
            assert len(row) == width or width < 80
