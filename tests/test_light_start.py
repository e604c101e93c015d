"""What the command line, the commands and the draft worker import for a model that runs on specgen's own engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"transformers", "huggingface_hub", "jinja2", "sympy", "torch._dynamo", "torch._inductor"}
NOT_FOR_HELP = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "pydantic"}
IN_WORKER = {"typer", "rich", "pydantic"}

# Python runs a module of this name at each start: here it notes at the end which modules were imported. The worker is killed, and
# runs no exit handlers: it notes its modules with each answer.
SITECUSTOMIZE = """
import atexit, json, os, sys
argv = getattr(sys, "orig_argv", [])
def note():
    name = "worker" if "specgen.workers" in argv else "command"
    path = os.path.join(os.environ["MODULES_TO"], name)
    part = f"{path}.{os.getpid()}"
    with open(part, "w") as file:
        json.dump(sorted(sys.modules), file)
    os.replace(part, path)  # the worker may be killed while it writes
atexit.register(note)
if "specgen.workers" in argv:
    from multiprocessing.connection import Connection
    send = Connection.send_bytes
    def noted(*arguments):
        note()
        send(*arguments)
    Connection.send_bytes = noted
"""


def imported(folder: Path, *arguments: str) -> dict[str, set[str]]:
    """The modules that a command (and its draft worker) had imported, by `command` and `worker`."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MODULES_TO": str(folder)}
    command = [sys.executable, "-m", "specgen", *arguments]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=120)
    return {name: set(json.loads((folder / name).read_text())) for name in ("command", "worker") if (folder / name).exists()}


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (("--help",), NOT_FOR_HELP),
        (("generate", "def f(", "-n", "2", "-m", "eesd"), HEAVY),
        (("compare", "--methods", "ar,svip", "--limit", "1", "--repeats", "1", "-n", "2"), HEAVY),
        (("inspect", "--target", "{target}", "--draft", "{draft}"), HEAVY),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_a_command_imports_no_library_that_it_does_not_need(
    arguments: tuple[str, ...], unneeded: set[str], tmp_path: Path
) -> None:
    from specgen import demo

    folders = {role: str(demo.folder(role)) for role in demo.ROLES}
    seen = imported(tmp_path, *(argument.format(**folders) for argument in arguments))
    assert seen["command"].isdisjoint(unneeded)
    assert "torch" in seen["command"] | unneeded
    assert "worker" not in seen


@pytest.mark.skipif(os.name != "posix", reason="the worker is a process on POSIX systems only")
def test_the_draft_worker_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    seen = imported(tmp_path, "generate", "def f(", "-n", "8", "-m", "pearl", "--set", "window=3")
    assert seen["command"].isdisjoint(HEAVY)
    assert "torch" in seen["worker"]
    assert seen["worker"].isdisjoint(HEAVY | IN_WORKER)
