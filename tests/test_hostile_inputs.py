"""Traces, prompt files, streams and environment variables with impossible values: one line, valid JSON, no traceback."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
import typer
from cli_helpers import POSIX, parsed, run, run_main
from comparisons import Compare

from specgen.base import input_files
from specgen.base.errors import SpecgenError
from specgen.base.files import load_yaml
from specgen.base.types import Draft, Round, Verdict
from specgen.cli import error_reporting
from specgen.compare.prompts import load_prompts
from specgen.engine.layer_skipping import SkippedLayers
from specgen.train.corpus import read_corpus
from specgen.view.generation import parts

Main = Callable[..., tuple[int, str, str]]
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
VIEWS: tuple[tuple[str, ...], ...] = ((), ("--json",), ("--html", "page.html", "-q"))


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    return lambda *arguments: run_main(monkeypatch, capfd, *map(str, arguments))


# ------------------------------------------------------------------ figures in traces


def shown(main: Main, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspects the trace in all three views, and parses the JSON lines."""
    monkeypatch.chdir(path.parent)
    for view in VIEWS:
        code, out, err = main("inspect", path, *view)
        assert (code, err) == (0, "")
        if view == ("--json",):
            assert parsed(out)


@pytest.mark.parametrize("value", [0, 5e-324, 1e-310, 1e299])
@pytest.mark.parametrize("name", ["seconds", "entropies", "top_probs", "overlap", "kl", "alpha beta", "mean deviation"])
def test_extreme_figures_are_shown_or_refused(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    lines = traces.a_recorded_run(6)
    for line in lines:
        if line["type"] == "round":
            if name == "seconds":
                line["seconds"] = dict.fromkeys(line["seconds"], value)
            elif " " in name:
                line["policy"] = dict.fromkeys(name.split(), value)
            else:
                line[name] = [value] * len(line["draft_ids"])
    path = traces.write(tmp_path / "t.jsonl", *lines)
    if (name, value) == ("seconds", 1e299):
        assert "seconds.prefill: " in main("inspect", path)[2]
    else:
        shown(main, path, monkeypatch)


@pytest.mark.parametrize("name", ["seconds", "drafts", "drafted", "accepted", "target_passes"])
@pytest.mark.parametrize("value", [5e-324, 1e299, -1, "x", None, [], True])
def test_summaries_of_other_programs_with_impossible_figures_are_shown(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    start, *_, summary = traces.a_run()
    figures = {"rounds": 3, "target_passes": 3, "drafts": 2, "drafted": 4, "accepted": 3, "seconds": 1.0}
    shown(main, traces.write(tmp_path / "t.jsonl", start, {**summary, **figures, name: value}), monkeypatch)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param("9" * 400, "99999999999999999999… is too large", id="400 digits"),
        ("-" + "9" * 19, "is too large"),  # below -2^63
        ("1e400", "1e400 is too large"),
        ("[" * 600 + "]" * 600, "more than 100 levels of nesting"),
        ('{"a":' * 600 + "1" + "}" * 600, "more than 100 levels of nesting"),
    ],
)
@pytest.mark.parametrize("key", ["sampling", "settings"])
def test_numbers_without_a_float_and_deep_nesting_are_refused(main: Main, tmp_path: Path, key: str, value: str, why: str) -> None:
    lines = copy.deepcopy(traces.a_run())
    lines[0][key]["temperature"] = "@"
    path = traces.write(tmp_path / "t.jsonl", *lines)
    path.write_text(path.read_text(encoding="utf-8").replace('"@"', value), encoding="utf-8")
    for view in VIEWS[:2]:
        code, out, err = main("inspect", path, *view)
        assert (code, out) == (2, "")
        assert "line 1: is not JSON (" in err
        assert why in err
        assert err.count("\n") == 1


class Counted(list[int]):
    """A list that counts how often many of its elements are read, one after the other or as a part."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.passes += isinstance(index, slice)
        return super().__getitem__(index)

    def count(self, value: int) -> int:
        self.passes += 1
        return super().count(value)


def test_a_large_tree_is_read_once_for_each_view() -> None:
    size = 200
    path = tuple(range(1, size, 2))  # always the second of two siblings
    parents = Counted(-1 if node < 2 else path[node // 2 - 1] for node in range(size))
    round_ = Round(1, "sequential", Draft([7] * size, parents), Verdict(path, 7, "bonus"))
    found = parts(round_, lambda tokens: "x")
    assert [part.text for part in found if part.kind == "accepted"] == ["x²"] * (size // 2)
    assert parents.passes <= 5, "quadratic time"


# ------------------------------------------------------------------ summaries edited before --resume

_kept: dict[str, str] = {}  # the trace of a comparison, which all tests edit


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"perplexity": 0}, "0 for perplexity"),
        ({"perplexity": "x"}, "'x' for perplexity"),
        ({"phase_seconds": 5}, "5 for phase_seconds"),
        ({"phase_seconds": {"draft": "x"}}, "'x' for draft"),
        ({"phase_seconds": {"unknown": 1.0}}, "1.0 for unknown"),
        ({"joules_per_token": "x"}, "'x' for joules_per_token"),
        ({"gross_joules_per_token": []}, "[] for gross_joules_per_token"),
        *(({"energy": value}, f"{value!r} for energy") for value in ("x", [], {"joules": None}, {"joules": 1.0, "source": "x"})),
        ({"seconds": 5e-324}, "5e-324 for seconds"),
        ({"seconds": None}, "None for seconds"),
        ({"target_passes": "x"}, "'x' for target_passes"),
        ({"drafted": 1 << 60}, "1152921504606846976 for drafted"),
        ({"drafted": 10**400}, "is too large"),
        ({"accepted": True}, "True for accepted"),
    ],
)
def test_edited_summaries_are_refused(compare: Compare, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "t.jsonl"
    if "base" not in _kept:
        assert compare("-m", "sd", "--repeats", "1", "--limit", "2", "-n", "4", "--trace", str(path))[0] == 0
        _kept["base"] = path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in _kept["base"].splitlines()]
    lines = [{**line, **changes} if line["type"] == "summary" else line for line in lines]
    traces.write(path, *lines)
    code, _, err = compare("-m", "sd", "--repeats", "1", "--limit", "2", "-n", "4", "--resume", str(path))
    assert code == 2, err
    assert named in err
    assert err.strip().count("\n") == 0


# ------------------------------------------------------------------ YAML, corpora


@pytest.mark.parametrize(
    "number", ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20_000, "0" + "7" * 6000, ":".join(["59"] * 3000)]
)
@pytest.mark.parametrize("form", ["prompts: [{}]", "{}: 1", "!!int '{}'"])
def test_integers_of_thousands_of_digits_are_refused(main: Main, tmp_path: Path, number: str, form: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(form.format(number))
    code, _, err = main("compare", "-m", "ar", "--prompts", path)
    assert code == 2
    assert f"a number of {len(number):,} digits" in err
    assert load_yaml(f"'{number}'") == number, "in quotes it is text"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("c.txt", b"abc\0def", "line 1 has a NUL character"),
        ("c.jsonl", b"[" * 100_000, "line 1: not a JSON object with a text"),
        ("c.jsonl", b'{"text": "\\ud800"}', "line 1: not a JSON object with a text"),
        ("c.jsonl", b'{"text": "' + b"a" * (5 << 20) + b'"}', "line 1: longer than 4,194,304 characters"),
    ],
)
def test_corpora_that_are_no_text_are_refused(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecgenError, match=why):
        read_corpus(tmp_path / name, lambda text: list(text.encode()))


def test_a_layer_with_thousands_of_digits_does_not_exist() -> None:
    with pytest.raises(SpecgenError, match="skip names layer 9"):
        SkippedLayers.parse("9" * 5000, 4)
    assert str(SkippedLayers.parse("0000000000000003", 4)) == "3"


# ------------------------------------------------------------------ streams and the environment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("COLUMNS", value) for value in ("0", "1", "12", "²", "-5", "x", "", "9" * 20, "1e3")),
        *(("LINES", value) for value in ("0", "²")),
        *(("TERMINAL_WIDTH", value) for value in ("0", "1", "²", "x", "1e3")),
    ],
)
def test_impossible_sizes_of_the_terminal(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    if name == "TERMINAL_WIDTH":  # typer reads it when the first help text makes it import this module
        monkeypatch.delitem(sys.modules, "typer.rich_utils", raising=False)
        monkeypatch.delattr(typer, "rich_utils", raising=False)
    path = traces.write(tmp_path / "t.jsonl", *traces.a_run())
    for command in (("inspect", path), ("inspect", "--help"), ("inspect", "--methods")):
        code, out, err = main(*command)
        assert (code, err) == (0, "")
        assert out


class Endless(io.RawIOBase):
    """A stream without end, which counts what is read."""

    def __init__(self) -> None:
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.given += len(buffer)
        buffer[:] = b"y" * len(buffer)
        return len(buffer)


def test_standard_input_without_end_is_refused(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(endless)))
    code, out, err = main("generate", "-n", "3")
    assert (code, out) == (2, "")
    assert err == "error: the prompt on standard input is longer than 16 MiB. Give a part of it\n"
    assert endless.given < 20 << 20


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set after the first report of a wait. Every wait is long enough for one."""
    printed = threading.Event()
    note = error_reporting._note
    monkeypatch.setattr(error_reporting, "_note", lambda text: (note(text), printed.set()))
    monkeypatch.setattr(input_files, "PATIENCE", 0.005)
    return printed


@POSIX
def test_a_prompt_that_does_not_come_is_waited_for_with_a_note(
    main: Main, monkeypatch: pytest.MonkeyPatch, reported: threading.Event
) -> None:
    """The writer waits until the note is printed."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: (reported.wait(20), os.close(writer)))
    thread.start()
    with os.fdopen(reader) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        code, _, err = main("generate", "-n", "3")
    thread.join()
    assert code == 2
    assert err == ("waiting for the prompt on standard input\nerror: the prompt is empty. Give the model a text to continue\n")


@POSIX
@pytest.mark.parametrize("written", [0, 300], ids=["no byte", "a part"])
@pytest.mark.parametrize("is_named", [True, False], ids=["fifo", "/dev/fd"])
@pytest.mark.parametrize("reads", ["inspect", "--prompts", "--corpus"])
def test_an_input_that_makes_the_command_wait_is_named(
    main: Main, tmp_path: Path, reported: threading.Event, reads: str, is_named: bool, written: int
) -> None:
    """The writer writes the rest after the note, and without a note does not end."""
    lines = traces.a_run() if reads == "inspect" else [{"prompt": "a" * 30, "text": "b" * 30}] * 10
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / "fifo.jsonl"
    os.mkfifo(path)
    descriptor = -1 if is_named else os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def write() -> None:
        is_in_time = bool(written) or not is_named or reported.wait(20)
        with path.open("wb", buffering=0) as file:
            file.write(content[:written])
            if is_in_time and reported.wait(20):
                file.write(content[written:])

    thread = threading.Thread(target=write)
    thread.start()
    if not is_named:
        os.set_blocking(descriptor, True)
    given = path if is_named else Path(f"/dev/fd/{descriptor}")
    notes: list[str] = []
    with input_files.waits_reported(lambda text: (notes.append(text), reported.set())):
        if reads == "inspect":
            code, _, err = main("inspect", given)
            assert code == 0
            notes = err.splitlines()
        elif reads == "--prompts":
            assert len(load_prompts(given)) == 10
        else:
            assert read_corpus(given, lambda text: list(text.encode())).tokens >= 300
    thread.join()
    if not is_named:
        os.close(descriptor)
    assert notes == [f"waiting for a program that writes to {given}"], "once"


@POSIX
def test_a_fifo_in_a_profile_is_refused(main: Main, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "profile.yaml")
    assert "profile.yaml is not a file" in main("generate", "abc", "--profile", tmp_path)[2]


@FULL
@pytest.mark.parametrize("command", [("--help",), ("generate", "--help"), ("--version",), ()])
def test_help_on_a_full_disk_is_one_line(command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = run(*command, stdout=full, environment={"PYTHONUNBUFFERED": ""})
    assert (code, err) == (1, b"error: cannot write the output: No space left on device\n")


@FULL
@pytest.mark.parametrize("command", [("generate", "--no-such-option"), ("generate", "abc", "-m", "no-such-method")])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        assert run(*command, stderr=full, environment={"PYTHONUNBUFFERED": ""})[:2] == (2, b"")


@POSIX
@pytest.mark.parametrize(
    "home", [None, pytest.param("", marks=pytest.mark.slow), pytest.param("/nonexistent", marks=pytest.mark.slow)]
)
def test_without_a_home_folder_and_with_an_accent_in_a_locale_without_any(
    tmp_path: Path, pair: tuple[str, ...], home: str | None
) -> None:
    """All in one process: HOME unset, empty or missing and the user unknown, LC_ALL=C, an accent on standard input, marks that
    the locale lacks on standard output."""
    trace = traces.write(tmp_path / "t.jsonl", *traces.a_run())
    generate = ["generate", "-q", "-n", "3", "-m", "ar", "--device", "cpu", *pair]
    code = (
        "import os, pwd, sys; [os.environ.pop(name, None) for name in ('HOME', 'SPECGEN_DATA', 'SPECGEN_CACHE')]\n"
        f"home = {home!r}; home is None or os.environ.update(HOME=home); from specgen.cli.app import main\n"
        "pwd.getpwuid = lambda _: {}[()]\n"
        f"for arguments in ['inspect', {str(trace)!r}], {generate!r}:\n"
        "    sys.argv = ['specgen', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        input="caf\u00e9".encode(),
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    shown, generated = ended.stdout[:-4], ended.stdout[-4:]
    assert b"?rejected" in shown
    assert generated.strip().isalpha()
