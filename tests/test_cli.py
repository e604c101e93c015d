"""The commands where nothing is wrong, or where they are interrupted or cut off: streams, JSON
lines, exit codes."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import FULL, POSIX, Lines, parsed, run, run_main, start
from families import CONTEXT, LETTERS, make_tokenizer
from processes import Forked

PROMPT = "the cat sat on the mat"
PHASES = {"prefill", "draft", "policy", "verify", "sample", "other"}
SAMPLED = ("-n", "40", "--seed", "3", "--temperature", "1.5", "--ignore-eos")

Generate = Callable[..., tuple[str, str]]


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: tuple[str, ...]
) -> Generate:
    """Run `specgen generate` on the tiny pair in this process: its stdout and stderr."""

    def call(*arguments: str, models: tuple[str, ...] = pair) -> tuple[str, str]:
        code, out, err = run_main(
            monkeypatch, capfd, "generate", *models, "--device", "cpu", *arguments
        )
        assert code == 0
        return out, err

    return call


def check_record(lines: Lines) -> None:
    """Check that the rounds contain exactly the generated tokens, and the sums of the summary."""
    first, *rounds, last = lines
    assert (first["type"], last["type"]) == ("start", "summary")
    assert set(last["phase_seconds"]) == PHASES
    joined = []
    for position, line in enumerate(rounds):
        assert (line["type"], line["index"]) == ("round", position)
        assert set(line["seconds"]) == PHASES
        assert line["mode"] == ("sequential" if position else "prefill")
        assert len(line["draft_ids"]) == len(line["draft_texts"]) == len(line["parents"])
        joined += [
            *line["accepted_ids"],
            *([line["token_id"]] if line["token_id"] is not None else []),
        ]
    assert joined == last["token_ids"]
    assert last["new_tokens"] == len(joined)
    assert sum(last["phase_seconds"].values()) == pytest.approx(last["seconds"])
    assert last["rounds"] == last["target_passes"] == len(rounds)
    assert last["drafted"] == sum(len(line["draft_ids"]) for line in rounds)
    assert last["accepted"] == sum(len(line["accepted_ids"]) for line in rounds)


# -------------------------------------------------------------- pipes and signals, in new processes


@POSIX
def test_a_pipe_gets_the_text_alone_and_the_footer_goes_to_stderr() -> None:
    # drafts however busy the machine is
    costs = ("--set", "draft_cost=0.1", "--set", "verify_cost=0.02")
    process = Forked("generate", "-m", "adaptive", *costs, "-n", "30", "def add(a, b):\n    return")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out[-1:], len(out) > 20) == (0, b"\n", True)
    assert b"\x1b" not in out + err
    about, footer = filter(None, err.decode().splitlines())
    assert about == "demo pair, cpu float32, adaptive"
    assert re.fullmatch(
        r"adaptive  \d+ tokens  decoding [\d,.]+ tokens/s  prompt [\d,]+/s  \d+% accepted.*", footer
    )


def test_json_lines_add_up_and_are_the_same_in_the_trace(
    pair: tuple[str, ...], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    options = (*SAMPLED, "--json", "--trace", str(trace))
    code, out, err = run(
        "generate", *pair, *options, PROMPT, environment={"LC_ALL": "C", "PYTHONUTF8": "0"}
    )
    assert (code, len(err.splitlines()), out) == (0, 2, trace.read_bytes())
    assert not out.isascii()  # UTF-8 whatever the locale
    lines = parsed(out.decode())
    check_record(lines)
    given = {
        "max_new_tokens": 40,
        "temperature": 1.5,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 3,
        "stop": [],
        "ignore_eos": True,
    }
    unasked = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    unasked |= {"repetition_penalty": None, "logprobs": None, "grammar": None}
    assert lines[0]["sampling"] == given | unasked
    last = lines[-1]
    assert (last["finish_reason"], last["new_tokens"]) == ("length", 40)
    first = last["first_token_seconds"]
    assert last["decode_tokens_per_second"] == pytest.approx(39 / (last["seconds"] - first))
    assert last["prompt_tokens_per_second"] == pytest.approx(len(lines[0]["prompt_ids"]) / first)


@POSIX
def test_an_interruption_keeps_the_text_and_a_complete_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    process = Forked(
        "generate", "-n", "900", "--ignore-eos", "--trace", str(trace), "def add(a, b):"
    )
    seen = os.read(process.stdout.fileno(), 10)  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = parsed(trace.read_text(encoding="utf-8"))
    check_record(lines)
    assert lines[-1]["finish_reason"] == "interrupted"
    assert 1 <= lines[-1]["new_tokens"] < 900
    assert (seen + out).decode() == lines[-1]["text"].rstrip("\n") + "\n"
    assert err.splitlines()[-1].startswith(b"adaptive (interrupted)  ")
    assert b"Traceback" not in err


@POSIX
@pytest.mark.parametrize("module", [b"torch.nn.functional", b"typer.core"])
def test_an_interruption_while_importing_prints_no_traceback(module: bytes) -> None:
    process = start("generate", "hi", environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert process.stderr is not None
    while module not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert all(
        line.startswith(b"import time:") or line == b"interrupted" for line in err.splitlines()
    )


@POSIX
def test_a_reader_that_closes_the_pipe_causes_no_error() -> None:
    process = Forked("generate", "-n", "900", "--ignore-eos", "def add(a, b):")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b"demo pair, cpu float32, adaptive\n"
    assert process.wait(timeout=60) == 0


@FULL
def test_a_full_disk_is_reported_in_one_line_and_a_closed_output_is_none(
    pair: tuple[str, ...],
) -> None:
    with open("/dev/full", "wb") as full:
        process = Forked("generate", *pair, "-n", "5", PROMPT, stdout=full)
    _, err = process.communicate(timeout=120)
    last = err.splitlines(keepends=True)[-1]
    assert (process.returncode, last) == (
        1,
        b"error: cannot write the output: No space left on device\n",
    )
    process = Forked("generate", "-q", "-n", "5", *pair, PROMPT, closed=True)
    assert (process.communicate(timeout=120), process.returncode) == ((b"", b""), 0)


def test_torchs_idle_threads_leave_their_cores_to_others_in_the_program_only() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = "import os, sys, atexit; show = lambda: print(os.environ.get('OMP_WAIT_POLICY'))\n"
    code += (
        "import specgen.cli.app as app; show(); atexit.register(show)\nsys.argv[1:] "
        "= ['--version']; app.program()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    before, version, after = done.stdout.splitlines()
    assert (before, version[:8], after) == ("None", "specgen ", "PASSIVE")


# ---------------------------------------------------- text, options and the footer, in this process


def test_the_output_ends_before_a_stop_text(generate: Generate) -> None:
    whole, _ = generate("-n", "60", "--ignore-eos", PROMPT)
    position = next(n for n in range(20, 50) if whole[n : n + 3] not in whole[: n + 2])
    stop = whole[position : position + 3]
    out, _ = generate("-n", "60", "--ignore-eos", "--stop", "☃", "--stop", stop, PROMPT)
    assert out == whole[:position] + "\n"
    lines = parsed(generate("-n", "60", "--ignore-eos", "--stop", stop, "--json", PROMPT)[0])
    check_record(lines)
    assert (lines[-1]["finish_reason"], lines[-1]["text"]) == ("stop", whole[:position])


@pytest.mark.parametrize(
    ("arguments", "data", "prompt"),
    [
        (["-"], b"abc", "abc"),
        ([], b"abc", "abc"),
        ([], b"abc\r\n", "abc"),
        ([], b"abc\n\n", "abc\n"),
        ([], " é ".encode(), " é "),
        (["abc\n"], b"not read", "abc\n"),
        (
            ["--chat", "--system", "be brief", "hello"],
            b"",
            "system be brief\nuser hello\nassistant ",
        ),
    ],
)
def test_the_prompt_is_the_argument_or_standard_input_or_chat(
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    data: bytes,
    prompt: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    out, _ = generate("-n", "2", "--json", *arguments)
    assert parsed(out)[0]["prompt_ids"] == make_tokenizer(LETTERS)(prompt)["input_ids"]


@POSIX
def test_piped_text_is_part_of_the_users_turn(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    for more in ([], ["--no-stdin"]):
        reader, writer = os.pipe()
        os.write(writer, b"abc\r\n")
        os.close(writer)
        with open(reader, encoding="utf-8") as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            prompts.append(
                parsed(generate("-n", "2", "--json", "--chat", *more, "hello")[0])[0]["prompt_ids"]
            )
    tokenizer = make_tokenizer(LETTERS)
    assert prompts == [
        tokenizer(f"user {text}\nassistant ")["input_ids"] for text in ("hello\n\nabc", "hello")
    ]


def test_quiet_leaves_stderr_empty_and_a_seed_repeats_sampled_output(generate: Generate) -> None:
    loud, footer = generate(*SAMPLED, PROMPT)
    assert footer
    assert generate(*SAMPLED, "-q", PROMPT) == (loud, "")
    assert generate(*SAMPLED, "--seed", "4", PROMPT)[0] != loud
    assert generate(*SAMPLED[:2], *SAMPLED[4:], PROMPT) != generate(
        *SAMPLED[:2], *SAMPLED[4:], PROMPT
    )


def test_the_footer_and_the_summary_say_what_there_is(
    generate: Generate, pair: tuple[str, ...]
) -> None:
    out, footer = generate("-n", "20", "--json", PROMPT, models=pair[:2])
    assert footer.splitlines()[-1].startswith("adaptive (no draft model)  ")
    assert parsed(out)[0]["draft"] is None
    lines = parsed(generate("-n", "20", "--json", "-m", "sd", PROMPT)[0])
    prompt_seconds = len(lines[0]["prompt_ids"]) / lines[-1]["prompt_tokens_per_second"]
    assert prompt_seconds == pytest.approx(lines[-1]["first_token_seconds"])
    out, footer = generate("-n", "500", "--ignore-eos", "--json", PROMPT)
    lines = parsed(out)
    assert len(lines[0]["prompt_ids"]) + lines[-1]["new_tokens"] == CONTEXT
    assert f"(the context of {CONTEXT} tokens is full)" in footer
    assert "(-n)" not in footer


@POSIX
@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help-all")])
def test_a_help_text_whose_reader_has_ended_is_no_error(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.wait(60), process.stderr.read()) == (0, b"")


@POSIX
def test_arguments_are_utf8_in_a_locale_of_ascii_too(pair: tuple[str, ...]) -> None:
    environment = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    models = (*pair, "--device", "cpu", "-q", "-n", "3", "--json")
    code, out, err = run("generate", *models, "--stop", "\u00fc", "naéve", environment=environment)
    assert (code, err) == (0, b"")
    first = parsed(out.decode())[0]
    assert first["prompt_ids"] == [LETTERS.index(letter) for letter in "naéve"]
    assert first["sampling"]["stop"] == ["\u00fc"]


def test_mistakes_in_arguments_are_said_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(monkeypatch, capfd, "generate", "-5 + 3 =")
    assert (code, out) == (2, "")
    assert "A prompt that begins with a dash goes after --" in err
    assert "goes after" not in run_main(monkeypatch, capfd, "generate", "--tempp", "1")[2]
    assert "goes after" not in run_main(monkeypatch, capfd, "tune", "-5")[2]
    for seed in ("-1", str(2**63)):
        assert (
            f"between 0 and {2**63 - 1:,}"
            in run_main(monkeypatch, capfd, "generate", "--seed", seed, "a")[2]
        )
