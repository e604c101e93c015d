"""A hundred generated cases, the same in each run, and as many slow ones. And the fuzzer's own checks.

tests/fuzz.py runs any number of others.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import fuzz_cases
import fuzz_materials
import fuzzing
import pytest
from cli_helpers import POSIX
from fuzz_commands import Case
from fuzz_materials import Materials
from runner_checks import every

from specgen.base.errors import SpecgenError
from specgen.engine.fingerprint import weights_fingerprint
from specgen.view.theme import flavour

pytestmark = POSIX
SEED = 1
CASES = {
    "options": 3,
    "outputs": 10,
    "prompts": 18,
    "traces": 20,
    "profiles": 15,
    "configs": 7,
    "weights": 9,
    "exits": 9,
    "environment": 10,
}


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return fuzz_materials.make(tmp_path_factory.mktemp("materials"))


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "the rest"])
@pytest.mark.parametrize("part", every(3, CASES))
def test_generated_cases_end_with_a_code_and_a_line(materials: Materials, part: str, rest: bool) -> None:
    count = CASES[part]
    numbers = range(count, 2 * count) if rest else range(count)
    reports = [fuzzing.run_number(part, SEED, number, materials) for number in numbers]
    failed = [report for report in reports if report is not None]
    assert not failed, "\n".join(failed)


@pytest.fixture
def case(materials: Materials, tmp_path: Path) -> Iterator[Case]:
    made = Case("options", tmp_path / "case", materials)
    made.make_folders()
    made.args = ["inspect", "--methods"]
    return made


# ------------------------------------------------------------------ found by longer runs


def test_a_safetensors_header_that_cannot_be_read_is_reported(case: Case) -> None:
    offsets = '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [' + "9" * 400 + ", 8]}}"
    for number, header in enumerate(("[" * 100_000, offsets)):
        folder = case.folder / "in" / f"model{number}"
        shutil.copytree(case.materials.target, folder)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
        with pytest.raises(SpecgenError, match="cannot read the weights"):
            weights_fingerprint(folder)


@pytest.mark.parametrize("colours", ["x;²", "0;" + "9" * 5000])
def test_an_odd_background_is_an_unknown_one(colours: str) -> None:
    chosen = {
        text: flavour({"COLORFGBG": text}, no_color=False, many_colours=True) for text in (colours, "0;15", "15;0", "0;7", ";")
    }
    assert chosen == {
        colours: "dark" if colours[-1] == "9" else "ansi",
        "0;15": "light",
        "15;0": "dark",
        "0;7": "light",
        ";": "ansi",
    }


def test_a_trace_is_shown_on_a_terminal_that_is_narrower_than_its_titles(case: Case) -> None:
    path = case.folder / "in" / "t.jsonl"
    path.write_text(case.materials.traces[0], encoding="utf-8")
    case.args, case.environment, case.is_terminal = ["inspect", str(path)], {"COLUMNS": "12"}, True
    assert fuzzing.run(case) == []


@pytest.mark.parametrize(
    ("file", "change", "shown"),
    [
        ("config.json", {"attention_bias": "x"}, "attention_bias"),
        ("config.json", {"intermediate_size": 0}, "error: "),  # torch warns about tensors without an element
        ("tokenizer_config.json", {"bos_token": 1.5}, "bos_token has to be either str or AddedToken but got: float"),
    ],
)
def test_a_wrong_value_is_reported_without_names_and_warnings_of_python(
    case: Case, file: str, change: dict[str, object], shown: str
) -> None:
    folder = case.folder / "in" / "model"
    shutil.copytree(case.materials.target, folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    case.args = ["generate", "abc", "-n", "2", "-t", str(folder), "--device", "cpu", "--backend", "transformers"]
    assert fuzzing.run(case) == []
    assert shown in (case.folder.parent / "stderr").read_text()


# ------------------------------------------------------------------ the fuzzer


@pytest.mark.parametrize("part", fuzz_cases.PARTS)
def test_the_same_number_makes_the_same_case(materials: Materials, tmp_path: Path, part: str) -> None:
    def made(name: str, number: int) -> tuple[list[str], list[bytes]]:
        case = fuzz_cases.make_case(part, SEED, number, tmp_path / name, materials)
        files = [path.read_bytes() for path in sorted((case.folder / "in").rglob("*")) if path.is_file()]
        return [arg.replace(str(case.folder), "") for arg in case.args], files

    assert made("one", 3) == made("same", 3) != made("other", 4)


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        ("raise ValueError('x')", "ValueError: x"),
        ("sys.exit(4)", "the exit code is 4"),
        ("print('x', file=sys.stderr); sys.exit(2)", "no message of an error"),
        ("print('error: ' + 'x' * 2000, file=sys.stderr); sys.exit(1)", "more than 1,100 characters"),
        ("print('error: a\\nerror: b\\nerror: c\\nerror: d', file=sys.stderr); sys.exit(1)", "4 lines on stderr"),
        ("import warnings; warnings.warn('x')", "the warning x"),
        ("print('\\x1b[31mred')", "the control character"),
        ("print('NaN')", "not JSON"),
        ("print('{')", "not JSON"),
        ("open('/work-of-nobody', 'w')", "wrote outside its folder: open /work-of-nobody"),
        ("import os; os.rename('out/old.html', '/tmp/x')", "wrote outside its folder: os.rename /tmp/x"),
        ("import os; os.remove('/dev/full')", "wrote outside its folder: os.remove /dev/full"),
        ("import os; os.mkdir('out/made')", "out/made"),
        ("open('out/old.html', 'a').write('x')", "old.html"),
        ("import os; os.remove('out/old.html')", "removed"),
        ("import os; os.remove('out/fifo'); open('out/fifo', 'w').close()", "out/fifo"),
        ("import os; os.remove('dev/null'); open('dev/null', 'w').close()", "replaced"),
        ("open('in/trace', 'w').close()", "changed or made"),
        ("open('in/recorded', 'w').close()", "recorded lost what it recorded"),
        ("open('out/fifo', 'w').write('x' * 200_000); sys.exit(4)", "the exit code is 4"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "the network"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(0.5,), name='t').start()", "left the thread t"),
    ],
)
def test_what_the_fuzzer_notices(case: Case, monkeypatch: pytest.MonkeyPatch, behaviour: str, found: str) -> None:
    case.args = ["inspect", "--json"] if "print('{')" in behaviour or "NaN" in behaviour else ["inspect", "--methods"]
    case.args += ["in/trace", "--resume", "in/recorded"]
    case.outputs = [case.folder / name for name in ("in/trace", "in/recorded", "dev/null", "out/fifo")]
    (case.folder / "in" / "trace").write_text("lines")
    (case.folder / "in" / "recorded").write_text('{"type": "start"}\n{"type": "summary"}\n{"type": "start"}\n')
    monkeypatch.setattr(fuzzing, "main", lambda: exec(behaviour, {"sys": sys}))
    assert found in "\n".join(fuzzing.run(case))


def test_the_fuzzer_ends_a_command_that_hangs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    monkeypatch.setattr(fuzzing, "main", lambda: exec("while True: pass"))
    assert fuzzing.run(case)[0].startswith("still runs")


def test_a_command_that_ends_well_has_no_problems(case: Case) -> None:
    assert fuzzing.run(case) == []
    case.args, case.environment = ["generate", "--no-such-option"], {"HOME": None}
    assert fuzzing.run(case, alone=True) == []
    assert (case.folder.parent / "stderr").read_text().startswith("error: ")
    assert SpecgenError("x").exit_code in fuzzing.CODES
