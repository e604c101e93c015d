"""Where the prompt of `generate` comes from: the argument, a file and standard input."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_helpers import POSIX, run_main

from specgen.base.errors import SpecgenError
from specgen.cli import prompt_input
from specgen.cli.prompt_input import PromptInput

pytestmark = POSIX
Stdin = Callable[[int], None]


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stdin]:
    """Makes a descriptor standard input."""
    opened = []

    def use(descriptor: int) -> None:
        stream = open(descriptor, encoding="utf-8")  # noqa: SIM115  closed below
        opened.append(stream)
        monkeypatch.setattr(sys, "stdin", stream)

    yield use
    for stream in opened:
        stream.close()


def prompt(given: str | None, file: Path | None = None, *, reads_stdin: bool = True) -> str:
    return PromptInput(given, file, reads_stdin=reads_stdin).text()


def a_pipe(data: bytes) -> int:
    """Returns the end to read of a pipe that delivers these bytes."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return reader


def a_file(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_input_follows_the_prompt(stdin: Stdin, tmp_path: Path, kind: str) -> None:
    data = "one\r\ntwo é\r\n".encode()
    stdin(a_pipe(data) if kind == "pipe" else a_file(tmp_path / "text", data))
    assert prompt("Summarise:") == "Summarise:\n\none\ntwo é"


def test_a_file_follows_the_prompt_and_standard_input_both(stdin: Stdin, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("in the file\n")
    stdin(a_pipe(b"piped\n"))
    assert prompt("Compare:", file) == "Compare:\n\nin the file\n\npiped"
    stdin(a_pipe(b"piped\n"))
    assert prompt("-", file) == "piped\n\nin the file"
    stdin(a_pipe(b"piped\n"))
    assert prompt(None, file) == "in the file", "a file alone is the prompt"
    assert sys.stdin.read() == "piped\n"


def test_no_stdin_leaves_it_to_others(stdin: Stdin) -> None:
    stdin(a_pipe(b"the loop's next line\n"))
    assert prompt("hi", reads_stdin=False) == "hi"
    assert sys.stdin.read() == "the loop's next line\n"
    for given, words in (("-", "--no-stdin"), (None, "there is no prompt")):
        with pytest.raises(SpecgenError, match=words):
            prompt(given, reads_stdin=False)


def test_a_pipe_is_joined_whole_if_its_first_byte_comes_in_time(
    stdin: Stdin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_input, "FIRST_BYTE_SECONDS", 60.0)
    reader, writer = os.pipe()
    stdin(reader)
    asked = PromptInput("Summarise:", None, reads_stdin=True)
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.append(asked.text()))
    reading.start()
    for piece in (b"first\n", b"second\n"):
        os.write(writer, piece)
    os.close(writer)
    reading.join(60)
    assert read == ["Summarise:\n\nfirst\nsecond"]


def test_a_pipe_that_delivers_nothing_in_time_keeps_its_bytes(
    stdin: Stdin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_input, "FIRST_BYTE_SECONDS", 0.01)
    reader, writer = os.pipe()
    stdin(reader)
    assert prompt("hi") == "hi"
    os.write(writer, b"late")
    os.close(writer)
    assert sys.stdin.read() == "late"


def test_the_wait_for_a_pipe_does_not_delay_the_loading(
    stdin: Stdin, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def select(*given: object) -> tuple[list[int], list[int], list[int]]:
        waits.append(given[-1])  # type: ignore[arg-type]
        assert threading.current_thread() is not threading.main_thread()
        return [], [], []

    monkeypatch.setattr(prompt_input, "select", select)
    reader, writer = os.pipe()
    stdin(reader)
    assert prompt("hi") == "hi"
    assert waits == [1.0]
    os.close(writer)


@pytest.mark.parametrize("kind", ["late", "empty", "blank", "text", "not read", "/dev/null"])
def test_a_pipe_that_gives_no_text_is_told(
    stdin: Stdin, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(prompt_input, "FIRST_BYTE_SECONDS", 0.01 if kind == "late" else 60.0)
    reader, writer = os.pipe()
    if kind != "late":
        os.write(writer, {"blank": b" \n", "text": b"text"}.get(kind, b""))
        os.close(writer)
    if kind == "/dev/null":
        os.close(reader)
        reader = os.open(os.devnull, os.O_RDONLY)
    stdin(reader)
    asked = PromptInput("Summarise:", None, reads_stdin=kind != "not read")
    asked.text()
    begins = {
        "late": "Nothing came from standard input within a second",
        "empty": "Standard input was empty",
    }
    begins["blank"] = begins["empty"]
    assert asked.note.partition(":")[0] == begins.get(kind, "")
    if kind == "late":
        assert "-f FILE" in asked.note
        assert "--no-stdin" in asked.note
        os.close(writer)


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "Standard input was empty: the prompt is taken alone.\n"), (("-q",), "")],
)
def test_generate_shows_the_note_on_a_pipe_unless_it_is_quiet(
    stdin: Stdin,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pair: tuple[str, ...],
    options: tuple[str, ...],
    said: str,
) -> None:
    stdin(a_pipe(b""))
    code, _, err = run_main(
        monkeypatch, capfd, "generate", *pair, "-m", "ar", "-n", "2", *options, "abc"
    )
    assert code == 0
    assert (
        "".join(line for line in err.splitlines(keepends=True) if "tandard input" in line) == said
    )


@pytest.mark.parametrize(
    "kind", ["/dev/null", "terminal", "socket", "closed", "empty pipe", "blank file", "folder"]
)
def test_nothing_else_is_joined(
    stdin: Stdin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "/dev/null":
        stdin(os.open(os.devnull, os.O_RDONLY))
    elif kind == "terminal":
        ours, theirs = os.openpty()
        os.write(ours, b"typed ahead\n")
        stdin(theirs)
    elif kind == "socket":
        ends = socket.socketpair()
        ends[0].sendall(b"sent")
        stdin(ends[1].detach())
        ends[0].close()
    elif kind == "closed":
        monkeypatch.setattr(sys, "stdin", None)
    elif kind == "empty pipe":
        stdin(a_pipe(b""))
    elif kind == "blank file":
        stdin(a_file(tmp_path / "blank", b" \n"))
    else:
        monkeypatch.setattr(sys, "stdin", Folder(tmp_path))
    assert prompt("hi") == "hi"


class Folder:
    """Standard input as a folder (`< .`)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fileno(self) -> int:
        return os.open(self._path, os.O_RDONLY)


@pytest.mark.parametrize(
    "data",
    [
        b"one\ntwo",
        b"one\ntwo\n",
        b"one\r\ntwo\r\n",
        b"\xef\xbb\xbfone\r\ntwo",
        b"\xef\xbb\xbfone\ntwo\n",
    ],
)
def test_line_ends_and_a_byte_order_mark_change_nothing(
    stdin: Stdin, tmp_path: Path, data: bytes
) -> None:
    file = tmp_path / "prompt.txt"
    stdin(a_file(file, data))
    assert prompt(None, file) == prompt(None) == "one\ntwo"


def test_inner_line_feeds_and_the_argument_stay(stdin: Stdin) -> None:
    stdin(a_pipe(b"\n one\rtwo \n\n"))
    assert prompt("-") == "\n one\rtwo \n"
    assert prompt("a\r\nb\n") == "a\r\nb\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"caf\xe9", r"is not UTF-8 \(at byte 3\)"),
        (b"%PDF-1.7\n", "is a PDF. .*pdftotext"),
        (b"x" * 9, "longer than 0 MiB"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_wherever_it_is(
    stdin: Stdin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    file = tmp_path / "prompt.pdf"
    if "longer" in words:
        monkeypatch.setattr(prompt_input, "LONGEST", 8)
    for given in ("hi", "-"):
        for descriptor in (a_file(file, data), a_pipe(data)):
            stdin(descriptor)
            with pytest.raises(SpecgenError, match=words):
                prompt(given)
    if "longer" not in words:  # a file's own limit is tested with the other files
        with pytest.raises(SpecgenError, match=words):
            prompt(None, file)


def test_an_empty_file_beside_a_prompt_is_refused(stdin: Stdin, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n")
    stdin(os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(SpecgenError, match=r"empty\.txt is empty"):
        prompt("Summarise:", file)
