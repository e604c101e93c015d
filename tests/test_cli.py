"""The commands where nothing is wrong, interrupted or cut off: streams, JSON lines, round lines, exit codes."""

from __future__ import annotations

import inspect
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_helpers import POSIX, ROUND, START, SUMMARY, Lines, parsed, run, run_main, start
from families import CONTEXT, LETTERS, make_tokenizer
from processes import Forked
from rank_processes import environments

from specgen.cli import options as cli_options
from specgen.methods import METHODS

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
PROMPT = "the cat sat on the mat"
PHASES = {"prefill", "draft", "policy", "verify", "sample", "other"}

Generate = Callable[..., tuple[str, str]]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: tuple[str, ...]) -> Generate:
    """Run `specgen generate` on the tiny pair in this process: its stdout and stderr."""

    def call(*arguments: str, models: tuple[str, ...] = pair) -> tuple[str, str]:
        code, out, err = run_main(monkeypatch, capfd, "generate", *models, "--device", "cpu", *arguments)
        assert code == 0
        return out, err

    return call


def check_record(lines: Lines) -> None:
    """Check that the lines have the documented keys and no others, and that the rounds contain exactly the generated tokens."""
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


# ------------------------------------------------------------------ pipes and signals, in new processes


@POSIX
def test_a_pipe_gets_the_text_alone_and_the_footer_goes_to_stderr() -> None:
    process = Forked("generate", "-n", "30", "def add(a, b):\n    return")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.endswith(b"\n")
    assert len(out) > 20
    assert b"\x1b" not in out + err
    assert re.fullmatch(r"adaptive  \d+ tokens  [\d.]+ tokens/s  \d+% accepted  .*verif.*", err.decode().strip())


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


def test_recorded_distributions_have_two_figures_per_drafted_token(generate: Generate, pair: tuple[str, ...]) -> None:
    options = ("-n", "20", "--ignore-eos", "-m", "sd", "--json", "-q")
    lines = parsed(generate(*options, "--record", "distributions", PROMPT)[0])
    for line in lines[1:-1]:
        assert set(line) == {*ROUND.split(), "overlap", "kl"}
        assert len(line["overlap"]) == len(line["kl"]) == len(line["draft_ids"])
        assert all(0 <= overlap <= 1 for overlap in line["overlap"])
        assert all(kl >= 0 for kl in line["kl"])
    assert any(line["overlap"] for line in lines[1:-1])
    unrecorded = parsed(generate(*options, PROMPT)[0])
    assert unrecorded[-1]["token_ids"] == lines[-1]["token_ids"]
    code, _, err = run("generate", *pair, *options[:-2], "--record", "distributions", PROMPT)
    assert (code, b"--record distributions" in err) == (2, True)


@pytest.mark.slow
def test_a_character_that_the_locale_lacks_becomes_a_question_mark(pair: tuple[str, ...]) -> None:
    options = ("-n", "40", "--seed", "3", "--temperature", "1.5", "--ignore-eos", "-q")
    code, out, err = run("generate", *pair, *options, PROMPT, environment={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, b"")
    assert b"?" in out


@POSIX
def test_an_interruption_keeps_the_text_and_a_complete_trace(tmp_path: Path) -> None:
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
    assert err.strip().startswith(b"adaptive (interrupted)  ")
    assert b"Traceback" not in err


@POSIX
@pytest.mark.parametrize(
    ("module", "environment"),
    [(b"torch.nn.functional", {}), (b"torch.nn.functional", environments()[0]), (b"typer.core", {})],
    ids=["torch", "torchrun", "command line"],
)
def test_an_interruption_while_importing_prints_no_traceback(module: bytes, environment: dict[str, str]) -> None:
    process = start("generate", "hi", environment={"PYTHONPROFILEIMPORTTIME": "1", **environment})
    assert process.stderr is not None
    while module not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert all(line.startswith(b"import time:") for line in err.splitlines())


@POSIX
@pytest.mark.parametrize("form", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["text", "json"])
def test_a_reader_that_closes_the_pipe_causes_no_error(form: tuple[str, ...]) -> None:
    process = Forked("generate", "-n", "900", "--ignore-eos", *form, "def add(a, b):")
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


@FULL
def test_a_full_disk_is_reported_in_one_line(pair: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        process = Forked("generate", *pair, "-n", "5", PROMPT, stdout=full)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, b"error: cannot write the output: No space left on device\n")


@POSIX
def test_a_closed_output_causes_no_error(pair: tuple[str, ...]) -> None:
    process = Forked("generate", "-q", "-n", "5", *pair, PROMPT, closed=True)
    assert process.communicate(timeout=120) == (b"", b"")
    assert process.returncode == 0


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    before = os.times()
    code, out, err = run("--help")
    after = os.times()  # processor time, as other tests run at the same time
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
    assert (code, err) == (0, b"")
    assert b"generate" in out
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'pydantic'}"
    check = f"import specgen.cli.app, sys; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=60, check=False)
    assert done.stderr.strip() == b""


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_torchs_idle_threads_leave_their_cores_to_others_in_the_program_only(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    show = "import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    program = f"import sys, atexit; atexit.register(lambda: exec({show!r}))\nimport specgen.cli.app as app\n"
    program += "sys.argv[1:] = ['--version']\napp.program()"
    library = f"import specgen.cli.app; specgen.METHODS\n{show}"
    lines = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60).stdout.split(
            "\n"
        )
        for code in (program, library)
    ]
    assert lines == [[lines[0][0], expected, ""], [given.get("OMP_WAIT_POLICY", "None"), ""]]
    assert lines[0][0].startswith("specgen ")


def test_without_a_command_the_help_is_shown() -> None:
    code, out, err = run()
    assert (code, err) == (2, b"")
    assert b"Usage" in out


# ------------------------------------------------------------------ text, options and the footer, in this process


def test_the_output_ends_before_a_stop_text(generate: Generate) -> None:
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
def test_chat_formats_the_prompt_with_the_chat_template(generate: Generate, system: str | None) -> None:
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
    ids=["dash", "missing", "newline", "crlf", "one-newline-of-two", "spaces-kept", "argument-unchanged"],
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


def test_the_footer_says_that_there_is_no_draft_model(generate: Generate, pair: tuple[str, ...]) -> None:
    _, footer = generate("-n", "20", PROMPT, models=pair[:2])
    assert footer.strip().startswith("adaptive (no draft model)  ")
    out, _ = generate("-n", "20", "--json", PROMPT, models=pair[:2])
    assert parsed(out)[0]["draft"] is None


def test_plain_decoding_has_no_acceptance_rate(generate: Generate) -> None:
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
    own = {"width": 1, "depth": "auto", "nodes": "auto", "cape": False, "translation": "tokens"}
    assert first["settings"] == {"policy": "heuristic", "k": 3, "max_draft": 40} | own
    assert len(second["draft_ids"]) == 3


def test_help_method_describes_one_method(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(monkeypatch, capfd, "generate", "--help-method", "-m", "svip")
    assert code == 0
    head, *settings = out.splitlines()
    assert head.startswith("svip  SVIP  lossless")
    assert [line.split("=")[0].strip() for line in settings] == ["threshold", "c", "every", "max_draft"]


def test_inspect_lists_every_method_and_only_the_policies_that_it_can_take(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run_main(monkeypatch, capfd, "inspect", "--methods")
    assert (code, err) == (0, "")
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in heads] == list(METHODS)
    assert all(method.paper in line for method, line in zip(METHODS.values(), heads, strict=True))
    needs = {line.split()[0]: line.partition("  needs ")[2] for line in heads}
    assert [needs[name] for name in ("sd", "eesd", "eagle", "lookup")] == ["a draft model", "an exit layer", "a trained head", ""]
    lookup = out[out.index("\nlookup") : out.index("\npearl")]
    assert "beta-ts" in lookup
    assert "svip" not in lookup
    assert "policy=adaptive" in lookup
    assert out.count("k=N alone: policy=fixed") == 2, "lookup, suffix"


@dataclass(frozen=True)
class Longer(cli_options.SamplingOptions):
    max_new_tokens: cli_options.MaxNewTokens = 999


def test_a_command_takes_a_group_of_options_as_one_value() -> None:
    taken = []

    @cli_options.grouped
    def command(profile: cli_options.Profile = None, *, sampling: Longer, energy: cli_options.Energy = False) -> None:
        taken.append((profile, sampling, energy))

    parameters = inspect.signature(command).parameters
    sampling = ["max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"]
    assert list(parameters) == ["profile", *sampling, "energy"]
    assert [parameters[name].default for name in sampling] == [999, 0.0, 1.0, 0, None, False]
    given = dict.fromkeys(sampling, 3)
    command(profile="hi", **given, energy=True)
    assert taken == [("hi", Longer(**given), True)]


# ------------------------------------------------------------------ round lines


@pytest.mark.parametrize("width", [100, 60])
def test_rounds_show_a_legend_then_one_line_per_round_then_the_answer(
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
