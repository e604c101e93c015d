"""Output on a terminal: one process runs several commands on a pseudo-terminal, and the tests read
what they wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import groupby

import pytest
from families import VOCAB, WORDS, make_model, make_tokenizer, save

from specgen.base.types import LARGEST

PROMPT = "the cat sat on the mat"
CONTROLS = [*WORDS[:3], *"abc.", *map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066))]
# so many that some are sampled
CONTROLS += [f"\x1b[{colour}m\x07\x9b{colour}m" for colour in range(VOCAB - len(CONTROLS))]

_SCENES = """
import fcntl, json, os, struct, sys, termios
from specgen.cli.app import main
for name, (width, environment, arguments) in json.loads(sys.argv[1]).items():
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    os.environ.pop("NO_COLOR", None)
    os.environ.update(environment)
    sys.argv = ["specgen", *arguments]
    try:
        main()
    except SystemExit as ended:
        os.write(1, f"<<{name} ended with {ended.code}>>".encode())
"""


@pytest.fixture(scope="module")
def screens(pair: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """By name the output of several commands that run one after the other on one
    pseudo-terminal."""
    if sys.platform == "win32":
        pytest.skip("no pseudo-terminals")
    import pty

    model = make_model("llama")
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    hostile = ("-t", save(model, tmp_path_factory.mktemp("hostile"), make_tokenizer(CONTROLS)))
    usual = ["generate", *pair, "-m", "sd", "--ignore-eos", "-n", "30", PROMPT]
    random = [
        "generate",
        *hostile,
        "--ignore-eos",
        "-n",
        "60",
        "--temperature",
        "50",
        "--seed",
        "1",
        "-m",
        "lookup",
        "abc",
    ]
    scenes: dict[str, tuple[int, dict[str, str], list[str]]] = {
        "colours": (100, {}, usual),
        "no colours": (120, {"NO_COLOR": "1"}, usual),
        "rounds": (100, {}, [*usual, "--rounds"]),
        "rounds without colours": (100, {"NO_COLOR": "1"}, [*usual, "--rounds"]),
        "hostile": (100, {}, random),
        "hostile rounds": (100, {}, [*random, "--rounds"]),
        "conversation": (100, {}, ["generate", "--chat", "--trace", str(trace)]),
        "error": (60, {}, ["generate", "-m", "sivp", "hi"]),
        "error without colours": (60, {}, ["generate", "-m", "sivp", "--no-color", "hi"]),
    }
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "COLORFGBG", "SPECGEN_THEME")
    }
    environment |= {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _SCENES, json.dumps(scenes)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    typed = [
        "Where is Oslo?",
        "/method nosuch",
        "/nosuch",
        "/method sd:k=2",
        "/rounds",
        "And where\\",
    ]
    typed += ["\x1b[200~is\n/Lima?\x1b[201~", "/reset", "hi", "/quit"]
    os.write(ours, "".join(f"{line}\n" for line in typed).encode())
    seen = bytearray()
    while data := _read(ours):
        seen += data
    os.close(ours)
    assert process.wait(timeout=60) == 0
    parts = re.split(r"<<([a-z0-9 ]+) ended with (\d+)>>", seen.decode())
    assert dict(zip(parts[1::3], parts[2::3], strict=True)) == {
        name: "2" if "error" in name else "0" for name in scenes
    }
    seen_in = {
        name: text.replace("\r\n", "\n")
        for name, text in zip(parts[1::3], parts[::3], strict=False)
    }
    return seen_in | {"trace": trace.read_text(encoding="utf-8")}


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux: the other end is closed
        return b""


def after_loading(screen: str) -> str:
    """What remains on the screen after the lines about loading were erased."""
    return screen.rpartition("\x1b[J")[2]


def plain(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", screen)


def styles(screen: str) -> dict[str, list[str]]:
    """The pieces of text by their ANSI codes."""
    pieces = re.findall(r"\x1b\[([0-9;]+)m([^\x1b]+)\x1b\[0m", screen)
    return {
        code: [text for _, text in group]
        for code, group in groupby(sorted(pieces), key=lambda piece: str(piece[0]))
    }


def test_accepted_text_is_green_on_a_terminal(screens: Mapping[str, str]) -> None:
    about, shown = after_loading(screens["colours"]).strip().split("\n", 1)
    answer, footer = shown.rsplit("\n", 1)
    assert "draft, cpu float32, sd" in about
    assert "".join(styles(answer)["32"])
    assert "accepted" in styles(footer)["32"]
    assert set(styles(answer)) == {"32"}  # the target's own is plain


def test_no_color_keeps_the_underline(screens: Mapping[str, str]) -> None:
    shown = after_loading(screens["no colours"])
    assert (
        plain(shown).splitlines()[:-1] == plain(after_loading(screens["colours"])).splitlines()[:-1]
    )
    assert set(styles(shown)) <= {"1", "2", "4"}
    assert "".join(styles(shown)["4"])


def test_token_statuses_differ_in_colour_and_in_attributes(screens: Mapping[str, str]) -> None:
    coloured = styles(after_loading(screens["rounds"]))
    mono = styles(after_loading(screens["rounds without colours"]))
    assert "accepted" in coloured["32"]
    assert "rejected" in coloured["9;31"]
    assert "discarded" in coloured["2"]
    assert "rejected" in mono["9"]
    assert "discarded" in mono["2"]
    assert "bonus" in mono["4"]
    assert set(mono) <= {"1", "2", "4", "9"}  # one attribute at a time: accepted tokens are not dim


@pytest.mark.parametrize("screen", ["hostile", "hostile rounds"])
def test_no_control_character_in_a_models_text_reaches_the_terminal(
    screens: Mapping[str, str], screen: str
) -> None:
    shown = plain(after_loading(screens[screen]))
    assert "␛[" in shown
    assert "␇�" in shown
    assert all(character.isprintable() for character in shown if character not in "\n\t")


def test_an_error_on_a_terminal_has_its_hint_below(screens: Mapping[str, str]) -> None:
    expected = (
        "error: there is no method 'sivp'; did you mean svip?\n       All of "
        "them: specgen inspect --methods\n"
    )
    assert plain(screens["error"]) == expected
    assert styles(screens["error"]) == {"1;31": ["error:"]}
    assert styles(screens["error without colours"]) == {"1": ["error:"]}


def test_a_conversation_keeps_its_turns_and_obeys_commands(screens: Mapping[str, str]) -> None:
    lines = [json.loads(line) for line in screens["trace"].splitlines()]
    starts, ends = (
        [line for line in lines if line["type"] == kind] for kind in ("start", "summary")
    )
    assert [start["method"] for start in starts] == ["adaptive", "sd", "sd"]
    assert starts[1]["settings"]["k"] == 2
    assert all(start["sampling"]["max_new_tokens"] == LARGEST for start in starts), (
        "answers end when the model ends them"
    )
    first = starts[0]["prompt_text"]
    answer = ends[0]["text"].strip()
    assert "Norway" in answer
    assert starts[1]["prompt_text"].startswith(f"{first} {answer}\nUser: And where\nis\n/Lima?")
    assert "Oslo" not in starts[2]["prompt_text"]
    screen = plain(screens["conversation"])
    assert "error: there is no method 'nosuch'" in screen
    assert "error: there is no command '/nosuch'. /help lists what there is" in screen
    assert screen.count("3/5 accepted") == 2  # the legends of the two answers with --rounds
