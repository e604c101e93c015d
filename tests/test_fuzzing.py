"""Generated files and options: each command ends with an exit code, at most one line of an error,
and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from cli_helpers import UNSAFE, parsed, run_main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.methods import METHODS

FEW = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 17, 2**31, 2**63, 10**400, 1.5, 1e299, 5e-324, float("nan"), float("inf")]
)
ODD = [
    "",
    " ",
    "x",
    "\x1b[2J\x9b31m",
    "=1+1",
    "a\nb\r\t",
    "é\u202e\u2028",
    "\ud800",
    "[bold]",
    "a" * 5000,
]
TEXTS = st.sampled_from(ODD) | st.text(max_size=5)
PLAIN = NUMBERS | TEXTS | st.none() | st.booleans()
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(TEXTS, PLAIN, max_size=2)
GIVEN = [
    "0",
    "-1",
    "1",
    "2",
    "7",
    "1e3",
    "nan",
    "inf",
    "x",
    "",
    "٣",
    "0x10",
    "1.5",
    "0.5",
    "9" * 400,
    "1e-320",
    "true",
    "auto",
]
MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors",
]
Main = Callable[..., tuple[int, str, str]]


@st.composite
def damaged(draw: st.DrawFn, valid: Any) -> Any:
    """A copy of a JSON value in which one value, at any depth, is replaced or removed."""
    if not isinstance(valid, dict | list) or not valid:
        return draw(VALUES)
    copy: Any = dict(valid) if isinstance(valid, dict) else list(valid)
    key = draw(st.sampled_from(list(copy) if isinstance(copy, dict) else range(len(copy))))
    if draw(st.integers(0, 4)):
        copy[key] = draw(damaged(copy[key]))
    elif draw(st.booleans()):
        copy[key] = draw(VALUES)
    else:
        del copy[key]
    return copy


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which a part may be replaced by noise."""
    start = draw(st.integers(0, 10 * len(data)))
    return (
        data[:start] + draw(st.binary(max_size=8)) + data[start + draw(st.integers(0, 20)) :]
        if start < len(data)
        else data
    )


def as_lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    """Runs a command and checks how it ends."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code, out, err = run_main(monkeypatch, capfd, *map(str, arguments))
        assert code in (0, 1, 2)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert errors == ([] if code == 0 else err.splitlines()[-1:])
        assert not UNSAFE.search(out + err)
        assert all(len(line) < 1100 for line in errors)
        return code, out, err

    return call


@FEW
@given(data=st.data())
def test_a_damaged_trace_is_shown_or_refused(
    main: Main, tmp_path: Path, data: st.DataObject
) -> None:
    view: tuple[str, ...] = data.draw(
        st.sampled_from([(), ("--json",), ("--html", "{page}", "-q")])
    )
    lines = [*traces.a_recorded_run(3), *traces.a_run("pearl", spec="pearl", category="c")]
    number = data.draw(st.integers(0, len(lines) - 1))
    path, page = tmp_path / "t.jsonl", tmp_path / "page.html"
    lines[number] = data.draw(damaged(lines[number]))
    path.write_bytes(data.draw(cut(as_lines(lines))))
    code, out, _ = main("inspect", path, *(part.format(page=page) for part in view))
    if view == ("--json",) and code == 0:
        assert parsed(out)
    if page.exists():
        assert not UNSAFE.search(page.read_text(encoding="utf-8"))


@settings(FEW, max_examples=40)
@given(data=st.data(), file=st.sampled_from(MODEL_FILES))
def test_a_damaged_model_generates_or_is_refused(
    main: Main, pair: tuple[str, ...], tmp_path: Path, file: str, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    path = Path(shutil.copytree(pair[1], tmp_path / "model", dirs_exist_ok=True)) / file
    content = path.read_bytes()
    if "json" in file:
        content = json.dumps(data.draw(damaged(json.loads(content)))).encode()
    path.write_bytes(data.draw(cut(content)))
    main("generate", "abc", "-q", "-n", "3", "-m", "ar", "-t", path.parent, "--device", "cpu")


@FEW
@given(data=st.data())
def test_any_options_generate_or_are_refused(
    main: Main, pair: tuple[str, ...], data: st.DataObject
) -> None:
    usable = [name for name, each in METHODS.items() if not each.head and not each.needs_exit_layer]
    method = data.draw(st.sampled_from(usable))
    values = st.sampled_from(GIVEN)
    names = data.draw(
        st.lists(st.sampled_from(["temperature", "top-p", "top-k", "seed"]), max_size=2)
    )
    given = [f"--{name}={data.draw(values)}" for name in names]
    for name in data.draw(
        st.lists(st.sampled_from([*METHODS[method].settings, "policy", "k"]), max_size=2)
    ):
        given += ["--set", f"{name}={data.draw(values)}"]
    main("generate", "abc abc", *pair, "--device", "cpu", "-q", "-n", "4", "-m", method, *given)
