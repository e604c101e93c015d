"""Mutants: the mistakes in `mutants.py` and the files like it, put into a copy of the package, make default tests fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from command_mutants import COMMAND_MUTANTS
from engine_mutants import ENGINE_MUTANTS
from head_mutants import HEAD_MUTANTS
from mutants import DECODING_MUTANTS, Mutant, Selection
from policy_mutants import POLICY_MUTANTS
from train_mutants import TRAIN_MUTANTS
from tree_mutants import TREE_MUTANTS
from view_mutants import VIEW_MUTANTS

import specgen

PACKAGE = Path(specgen.__file__).parent
TESTS = Path(__file__).parent
MUTANTS = [
    *DECODING_MUTANTS,
    *POLICY_MUTANTS,
    *TREE_MUTANTS,
    *ENGINE_MUTANTS,
    *HEAD_MUTANTS,
    *TRAIN_MUTANTS,
    *VIEW_MUTANTS,
    *COMMAND_MUTANTS,
]


def test_mutants_have_names_of_their_own_and_change_something() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.text != mutant.replacement for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (PACKAGE / mutant.file).read_text().count(mutant.text) == 1


def exit_code(tests: Selection, folder: Path) -> int:
    """Runs the tests with the package in `folder`, until the first failure. Returns pytest's exit code."""
    select = ["-k", tests.expression] if tests.expression else []
    config = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(TESTS.parent), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *config, str(TESTS / tests.path), *select]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def copy_package(folder: Path) -> Path:
    """Copies the package to `folder`: hard links if possible, since some files are large. Returns the copy."""
    copy = folder / "specgen"
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        shutil.copytree(PACKAGE, copy, copy_function=os.link, ignore=ignored)
    except (OSError, shutil.Error):  # another file system
        shutil.copytree(PACKAGE, copy, ignore=ignored, dirs_exist_ok=True, copy_function=shutil.copy)
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
    assert exit_code(mutant.tests, tmp_path) == 1, "1: tests failed; other codes are errors, such as a syntax error"
    assert pass_unchanged(mutant.tests)
