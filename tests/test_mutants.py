"""Mutants: the mistakes in `mutants.txt`, put into a copy of the package, make default tests
fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

import specgen

UNREADABLE = re.compile(r": (ImportError|ModuleNotFoundError|SyntaxError|NameError)\b")
PACKAGE = Path(specgen.__file__).parent
TESTS = Path(__file__).parent


class Selection(NamedTuple):
    """A selection of the default tests: a file or test in `tests/`, and pytest's `-k` expression
    (empty: all of them)."""

    path: str
    expression: str = ""


class Mutant(NamedTuple):
    """A mistake: in `file`, a path in the package, `replacement` is put in place of `text`, which
    occurs exactly once."""

    name: str
    file: str
    text: str
    replacement: str
    tests: Selection


def read_mutants() -> Iterator[Mutant]:
    file = ""
    tests = Selection("")
    for block in re.split(
        r"^(?=[@*])", (TESTS / "mutants.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]:
        head, *lines = block.splitlines()
        if head.startswith("@"):
            file, *given = head.removeprefix("@ ").split(" | ")
            tests = Selection(*given)
        else:
            text, replacement = (
                "\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
            )
            yield Mutant(head.removeprefix("* "), file, text, replacement, tests)


MUTANTS = list(read_mutants())


def test_mutants_have_names_of_their_own_and_change_something() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) > 200
    assert all(mutant.text != mutant.replacement for mutant in MUTANTS)


def test_the_text_of_each_mutant_occurs_once() -> None:
    sources = {file: (PACKAGE / file).read_text() for file in {each.file for each in MUTANTS}}
    counts = {mutant.name: sources[mutant.file].count(mutant.text) for mutant in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


class Outcome(NamedTuple):
    """Pytest's exit code, and each failure: the test and its exception."""

    code: int
    failures: list[str]


class BrokenCopy:
    """A copy of the package in `folder`, into which mistakes are put, and a process that runs tests
    with it (`fork_tests.py`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package = folder / "package"
        shutil.copytree(
            PACKAGE, self._package / "specgen", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(PACKAGE.parent / "examples.yaml", self._package)
        # checked by the sources' contents: those of two mistakes may be as long and as old
        compile_dir(
            self._package, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH, workers=1
        )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONPATH" and not name.startswith("PYTEST_")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", TESTS / "fork_tests.py"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._unchanged: dict[Selection, Outcome] = {}

    def close(self) -> None:
        self._process.communicate()

    def outcome(self, tests: Selection) -> Outcome:
        """Runs the tests until the first failure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
            options = [
                *("-q", "-x", "-n", "0", "-p", "no:cacheprovider"),
                *("-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(TESTS.parent)),
                *("--basetemp", f"{folder}/tests", "-k", tests.expression),
            ]
            request = [str(self._package), folder, [*options, str(TESTS / tests.path)]]
            print(json.dumps(request), file=self._process.stdin, flush=True)
            outcome = Outcome(*json.loads(self._process.stdout.readline()))
            print(Path(folder, "output").read_text())
        return outcome

    def outcome_unchanged(self, tests: Selection) -> Outcome:
        if tests not in self._unchanged:
            self._unchanged[tests] = self.outcome(tests)
        return self._unchanged[tests]

    def outcome_with(self, mutant: Mutant) -> Outcome:
        file = self._package / "specgen" / mutant.file
        source = file.read_text(encoding="utf-8")
        file.write_text(source.replace(mutant.text, mutant.replacement), encoding="utf-8")
        try:
            return self.outcome(mutant.tests)
        finally:
            file.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def broken_copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenCopy]:
    copy = BrokenCopy(tmp_path_factory.mktemp("mutants"))
    yield copy
    copy.close()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_default_tests_notice_a_mutant(mutant: Mutant, broken_copy: BrokenCopy) -> None:
    assert broken_copy.outcome_unchanged(mutant.tests).code == 0
    outcome = broken_copy.outcome_with(mutant)
    assert outcome.code == 1, "1: tests failed; other codes are errors"
    assert outcome.failures, "pytest itself has failed"
    # a mistake that stops the code from being read tests nothing
    assert not [failure for failure in outcome.failures if UNREADABLE.search(failure)]
