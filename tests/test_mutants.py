"""Mutants: the mistakes in `mutants.txt`, put into a copy of the package, make default tests
fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import specgen

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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (PACKAGE / mutant.file).read_text().count(mutant.text) == 1


def exit_code(tests: Selection, folder: Path) -> int:
    """Runs the tests with the package in `folder`, until the first failure. Returns pytest's exit
    code."""
    select = ["-k", tests.expression] if tests.expression else []
    config = [
        "-c",
        str(TESTS.parent / "pyproject.toml"),
        "--rootdir",
        str(TESTS.parent),
        "-p",
        "no:cacheprovider",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        *config,
        str(TESTS / tests.path),
        *select,
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False
    ).returncode


def copy_package(folder: Path) -> Path:
    """Copies the package to `folder`: hard links if possible, since some files are large. Returns
    the copy."""
    copy = folder / "specgen"
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        shutil.copytree(PACKAGE, copy, copy_function=os.link, ignore=ignored)
    except (OSError, shutil.Error):  # another file system
        shutil.copytree(
            PACKAGE, copy, ignore=ignored, dirs_exist_ok=True, copy_function=shutil.copy
        )
    return copy


@cache
def pass_unchanged(tests: Selection) -> bool:
    return exit_code(tests, PACKAGE.parent) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_default_tests_notice_a_mutant(mutant: Mutant, tmp_path: Path) -> None:
    file = copy_package(tmp_path) / mutant.file
    source = file.read_text().replace(mutant.text, mutant.replacement)
    file.unlink()  # a hard link: the original must stay
    file.write_text(source)
    assert exit_code(mutant.tests, tmp_path) == 1, (
        "1: tests failed; other codes are errors, such as a syntax error"
    )
    assert pass_unchanged(mutant.tests)
