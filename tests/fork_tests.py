"""Runs tests again and again, each time with the package in another folder, in processes forked
from this one, which has imported the libraries that the tests need, and nothing of the package.

Each line of standard input is a list in JSON: the folder that holds the package, an empty folder
for what the tests write, and pytest's arguments. The answer is one line: pytest's exit code, and
for each failure the test and its exception. What pytest has written is in `output` in the folder.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

import pytest

LIBRARIES = (
    "anyio.pytest_plugin",
    "hypothesis",
    "jinja2",
    "numpy",
    "pydantic.dataclasses",
    "pydantic.main",
    "rich.live",
    "rich.markdown",
    "rich.prompt",
    "safetensors.torch",
    "scipy.stats",
    "tokenizers.trainers",
    "torch",
    "transformers.convert_slow_tokenizer",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "typer.main",
    "xml.etree.ElementTree",
    "yaml",
)
SECONDS = 600  # a mistake may make a loop endless


class Failures:
    """A plugin of pytest's that notes what failed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        self.found.append(f"{report.nodeid}: {message}")


def run(package: str, folder: Path, arguments: Sequence[str]) -> int:
    """Run tests in this process. Returns pytest's exit code."""
    signal.alarm(SECONDS)
    os.chdir(folder)
    with open("output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {"PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    sys.path.insert(0, package)
    # only the tests that need the server start it
    forkserver.ensure_running = lambda: None
    failures = Failures()
    # libraries that are also plugins were imported without pytest's assertions, rightly
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *arguments], plugins=[failures])
    (folder / "failures").write_text(json.dumps(failures.found))
    return int(code)


def serve() -> None:
    for line in sys.stdin:
        package, name, arguments = json.loads(line)
        folder = Path(name)
        child = os.fork()
        if not child:
            sys.exit(run(package, folder, arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        failures = folder / "failures"
        found = json.loads(failures.read_text()) if failures.exists() else []
        print(json.dumps([code, found]), flush=True)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # torchao, which transformers imports, prints lines
    for library in LIBRARIES:
        import_module(library)
    logging.disable(logging.NOTSET)
    # spares each run the search for garbage among them
    gc.collect()
    gc.freeze()
    serve()
