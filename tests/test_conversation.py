"""What can be typed in a conversation: messages, commands, keys. The answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.interrupts import ReportedInterrupt
from specgen.base.types import SamplingParams
from specgen.cli import conversation
from specgen.cli.conversation import HELP, Conversation, Decoding
from specgen.cli.conversation_lines import line_reader
from specgen.cli.options import GenerateOutput
from specgen.view import theme

# texts of answers that Ctrl-C ends
INTERRUPTED = "half an ans"
UNSTARTED = ""


class Answer:
    """A writer of an answer whose text is known before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.has_begun = text != UNSTARTED

    def write(self) -> None:
        if self.text in (INTERRUPTED, UNSTARTED):
            raise ReportedInterrupt


class Talk:
    """A conversation in which these things are typed: lines, or errors that reading raises. `asked`
    are the messages and how they were answered."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        typed: Sequence[str | BaseException],
        answers: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self.asked: list[tuple[list[Mapping[str, str]], Decoding]] = []
        self.prompts: list[str] = []
        self._typed = [*typed, EOFError()]
        self._answers = list(answers)
        monkeypatch.setattr(conversation, "line_reader", lambda: self._read)
        sampling = SamplingParams(**more)
        Conversation(
            self._start,
            theme.console(stderr=True),
            None,
            Decoding("svip", {}, sampling, GenerateOutput()),
        ).run()
        assert not self._typed, "everything was read"
        self.said = capsys.readouterr().err

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        typed = self._typed.pop(0)
        if isinstance(typed, BaseException):
            raise typed
        return typed

    def _start(self, messages: Any, decoding: Decoding) -> Any:
        methods.find(decoding.name)
        if decoding.name == "medusa":
            raise SpecgenError("medusa needs a head")
        if messages == [{"role": "user", "content": "x"}]:
            return None
        self.asked.append((messages, decoding))
        return Answer(self._answers.pop(0))

    def contents(self, number: int) -> list[str]:
        """The messages of the prompt of this number."""
        return [message["content"] for message in self.asked[number][0]]


Begin = Callable[..., Talk]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Begin:
    return lambda *given, **more: Talk(capsys, monkeypatch, *given, **more)


def test_a_text_of_several_lines_is_one_message_and_answers_are_remembered(talk: Begin) -> None:
    done = talk(["one\n/two\n", "  ", "and\\", "more"], ["first", "second"])
    assert [done.contents(0), done.contents(1)] == [
        ["one\n/two"],
        ["one\n/two", "first", "and\nmore"],
    ]
    assert done.prompts == ["> ", "> ", "> ", "… ", "> "]


def test_unknown_commands_get_one_line_and_a_space_makes_a_message(talk: Begin) -> None:
    done = talk(
        ["/nosuch thing", "/", " /etc/hosts is what?", "/* code */\nint x;", "/save"], ["a", "b"]
    )
    errors = [line for line in done.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert "there is no command '/nosuch'. /help lists" in errors[0]
    assert "/save needs the name of a file" in errors[2]
    assert (done.contents(0), done.contents(1)[-1]) == (
        ["/etc/hosts is what?"],
        "/* code */\nint x;",
    )


def test_reset_forgets_and_system_stays(talk: Begin) -> None:
    done = talk(
        ["/system", "/system Be brief.\nAnd kind.", "hi", "/reset", "ho", "/system"], ["a", "b"]
    )
    assert done.contents(1) == ["Be brief.\nAnd kind.", "ho"]
    assert done.asked[0][0][0]["role"] == "system"
    for words in (
        "There is no system message.",
        "The system message is set.",
        "forgotten",
        "The system message: Be brief.",
    ):
        assert words in done.said


def test_method_is_shown_checked_and_confirmed(talk: Begin) -> None:
    done = talk(
        [
            "/method",
            "/method nosuch",
            "/method medusa",
            "hi",
            "/method sd:k=3",
            "ho",
            "/rounds",
            "ha",
        ],
        ["a", "b", "c"],
    )
    assert [(each.name, each.settings, each.output.rounds) for _, each in done.asked] == [
        ("svip", {}, False),
        ("sd", {"k": "3"}, False),
        ("sd", {"k": "3"}, True),
    ]
    assert "Decoding with svip. There are" in done.said
    assert " pearl " in done.said
    assert "error: there is no method 'nosuch'" in done.said
    assert "error: medusa needs a head" in done.said
    assert "Decoding with sd:k=3.\n" in done.said
    assert "Rounds are shown." in done.said


def test_regen_answers_the_last_message_anew(talk: Begin) -> None:
    typed = ["/regen", "one", "two", "/regen", "/regen", "three", "/regen"]
    done = talk(typed, ["a", "b", "c", "d", "e", "f"], temperature=1.0, seed=5)
    assert "error: there is no answer yet" in done.said
    assert [done.contents(number) for number in (2, 3)] == [["one", "a", "two"]] * 2
    assert done.contents(4) == ["one", "a", "two", "d", "three"]
    assert [each.sampling.seed for _, each in done.asked] == [5, 5, 6, 7, 5, 6], (
        "another seed gives another answer"
    )


def test_an_interrupted_answer_stays_as_far_as_it_came(talk: Begin) -> None:
    done = talk(["one", "two", "/regen", "three"], [INTERRUPTED, "b", UNSTARTED, "c"])
    assert done.contents(1) == ["one", INTERRUPTED, "two"]
    assert done.contents(3) == ["one", INTERRUPTED, "two", "b", "three"], (
        "the answer before stays where none replaces it"
    )


def test_ctrl_c_forgets_the_lines_that_were_begun(talk: Begin) -> None:
    done = talk(["wrong\\", KeyboardInterrupt(), "right"], ["a"])
    assert done.contents(0) == ["right"]
    assert done.prompts == ["> ", "… ", "> ", "> "]


@pytest.mark.parametrize(
    "typed", ["caf\udce9", UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "invalid")]
)
def test_a_line_that_is_not_utf_8_gets_one_line_and_ends_nothing(talk: Begin, typed: Any) -> None:
    done = talk([typed, "hi"], ["a"])
    assert done.contents(0) == ["hi"]
    assert done.said.count("error: the message is not UTF-8. ") == 1


def test_save_writes_messages_and_overwrites_nothing(talk: Begin, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    lost = tmp_path / "no" / "talk.jsonl"
    done = talk(
        [
            f"/save {file}",
            "/system é",
            "hi\nyou",
            f"/save {file}",
            "ho",
            f"/save {file}",
            f"/save {lost}",
        ],
        ["a", "b"],
    )
    text = file.read_text(encoding="utf-8")
    assert "é" in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["role"], line["content"]) for line in lines] == [
        ("system", "é"),
        ("user", "hi\nyou"),
        ("assistant", "a"),
    ]
    assert "error: there is nothing to save yet" in done.said
    assert "3 messages saved in " in done.said
    assert f"error: {file} exists, and nothing is overwritten" in done.said
    assert "error: cannot write the conversation " in done.said


def test_help_names_each_command(talk: Begin) -> None:
    done = talk(["/help"])
    assert all(command in done.said for command in HELP)
    assert "Ctrl-C" in done.said


def test_ctrl_c_right_after_enter_interrupts_and_other_keys_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As all keys that come before the terminal is given back, it would be a key of the next
    message."""
    monkeypatch.setenv("TERM", "xterm")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = line_reader()
        keys.send_text("hello\r\x03")
        with pytest.raises(KeyboardInterrupt):
            read("> ")
        keys.send_text("one\rtwo\r")
        assert [read("> "), read("> ")] == ["one", "two"]
