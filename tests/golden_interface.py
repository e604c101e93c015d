"""What users and scripts rely on, read from the program: commands, options, JSON keys, methods and
Python names.

`python tests/golden_interface.py --write` records it in `golden/interface.json`. `command` runs
`specgen` in this process.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

FILE = Path(__file__).parent / "golden" / "interface.json"
WIDTH = "999"  # columns of the help text, so that each option takes one line
# Dictionaries whose keys are data, such as names of settings, or depend on the machine. Their keys
# are not recorded.
OPEN = {"settings", "costs", "engine", "policy", "predicted", "perplexity", "left_out"}
OPEN |= {"tune.measured", "target_seconds", "pays_from"}
# dictionaries of equal records: the keys of one of them are recorded
BY_NAME = {"methods", "by_category"}
UNPROMISED = {"self", "announce", "process"}  # parameters that no user is told of


@contextmanager
def own_folders(**environment: str) -> Iterator[None]:
    """Sets the environment variables `environment` and empty folders for data and measurements
    while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        names = {
            "SPECGEN_DATA": f"{folder}/data",
            "SPECGEN_CACHE": f"{folder}/cache",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }
        with patch.dict(os.environ, {**names, "OMP_NUM_THREADS": "1", **environment}):
            yield


def command(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs `specgen` in this process, as `python -m specgen` does: its exit code, standard output
    and standard error."""
    out, err, nothing = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(3))
    with (
        own_folders(**environment),
        patch.object(sys, "argv", ["specgen", *arguments]),
        patch.object(sys, "stdin", nothing),
        patch("typer.rich_utils.MAX_WIDTH", None),  # which typer reads once: COLUMNS alone decides
        # a program of its own may stop collecting garbage, this process may not
        patch("gc.disable"),
        patch("gc.freeze"),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_module("specgen", run_name="__main__")
            code: Any = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    for stream in (out, err):
        stream.seek(0)
    return code, out.read(), err.read()


def help_of(name: str) -> tuple[str, dict[str, str]]:
    """A command's usage line, and for each option its short name, its values and its default, as
    `-n N =128`."""
    _, text, _ = command(
        *([name, "--help-all"] if name else ["--help"]), COLUMNS=WIDTH, TERMINAL_WIDTH=WIDTH
    )
    options = {}
    for row in re.findall(r"^[│|] +(--.*?) *[│|]$", text, re.MULTILINE):
        option, short, values, rest = re.fullmatch(
            r"(--[\w-]+)\s+(?:(-\w)\s+)?(\S+)(.*)", row
        ).groups()  # type: ignore[union-attr]
        default = re.search(r"\[default: (.*?)\]", rest)
        # what follows is the help text
        is_flag = values.startswith("<") or re.fullmatch(r"[A-Z][a-z]+\W?", values)
        parts = (short, None if is_flag else values, default and f"={default[1]}")
        options[option] = " ".join(filter(None, parts))
    usage = re.search(r"Usage: .*?\b(specgen .*)", text)
    assert usage
    return usage[1].strip(), options


def keys(value: dict[str, Any], kind: str, before: str = "") -> list[str]:
    """The keys of a JSON object, with inner objects' keys as `outer.inner` and those of objects in
    a list as `outer[].inner`.

    `kind` is the type of the line. Keys of objects in `OPEN` are left out. `before` is the prefix
    of an inner object's keys.
    """
    found = []
    for key, inner in value.items():
        name = before + key
        if key in BY_NAME and isinstance(inner, dict):
            inner = next(iter(inner.values()), None)
            name = f"{name}.*"
        if isinstance(inner, list) and inner:
            inner, name = inner[0], name + "[]" * isinstance(inner[0], dict)
        is_open = key in OPEN or f"{kind}.{key}" in OPEN
        found += (
            keys(inner, kind, f"{name}.")
            if isinstance(inner, dict) and inner and not is_open
            else [name]
        )
    return found


def lines(*arguments: str) -> list[dict[str, Any]]:
    """The objects in the JSON lines that a `specgen` command prints. Fails if the command does not
    succeed."""
    code, out, err = command(*arguments)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def json_keys(folder: Path) -> dict[str, list[str]]:
    """The keys of each type of JSON line, sorted, because their order is not promised. `folder` is
    for a trace file."""
    trace = str(folder / "trace.jsonl")
    short = ("-n", "4", "--json")
    generated = lines(
        "generate", "-m", "svip", *short, "--record", "distributions", "--trace", trace, "text"
    )
    records = {f"generate {line['type']}": line for line in generated}
    records["compare method"] = lines(
        "compare", "-m", "sd", *short, "--limit", "1", "--repeats", "1", "--trace", trace
    )[-1]
    compared = map(json.loads, Path(trace).read_text(encoding="utf-8").splitlines())
    records["compare start"] = next(line for line in compared if line["type"] == "start")
    records["tune"] = lines("tune", "-m", "ar", *short, "--limit", "1", "--budget", "5")[0]
    records["inspect pair"] = lines("inspect", "--measure", "--json")[0]
    records["inspect trace"] = lines("inspect", trace, "--json")[0]
    return {name: sorted(keys(record, name.split()[0])) for name, record in records.items()}


def methods() -> dict[str, Any]:
    """What `inspect --methods --json` says of each method, without help texts."""
    found = {}
    for line in lines("inspect", "--methods", "--json"):
        settings = {}
        for name, setting in line.pop("settings").items():
            low = setting["low"]
            high = setting["high"]
            choices = setting["choices"]
            settings[name] = [setting["default"], "|".join(choices) if choices else [low, high]]
        name = line.pop("name")
        found[name] = {**line, "settings": settings}
    return found


def python_names() -> dict[str, Any]:
    """The signatures of the Python interface, and the methods by name."""
    import specgen

    def parameters(function: Any) -> list[str]:
        found = [
            each
            for each in inspect.signature(function).parameters.values()
            if each.name not in UNPROMISED
        ]
        return [
            re.sub(r":.*?(?= = |$)", "", str(each))
            for each in found
            if each.kind is not each.VAR_KEYWORD
        ]

    pair = specgen.Pair
    return {
        "load": parameters(specgen.load),
        "pair.generate": parameters(pair.generate),
        "pair.rounds": parameters(pair.rounds),
        "SamplingParams": [
            f"{each.name} = {each.default!r}" for each in fields(specgen.SamplingParams)
        ],
        "SpecgenError": issubclass(specgen.SpecgenError, Exception),
        "Result": [
            name
            for name in ("text", "token_ids", "rounds", "summary")
            if hasattr(specgen.Result, name)
        ],
        "METHODS": list(specgen.METHODS),
    }


def record() -> dict[str, Any]:
    """Everything that the golden file holds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usage = {
            name or "specgen": help_of(name)
            for name in ("", "generate", "compare", "inspect", "tune", "serve")
        }
        return {
            "usage": {name: line for name, (line, _) in usage.items()},
            "options": {name: options for name, (_, options) in usage.items()},
            "json": json_keys(folder),
            "methods": methods(),
            "python": python_names(),
        }


def written(content: Any) -> str:
    """JSON with inner objects on lines of their own, but without line breaks in lists."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return (
        re.sub(
            r"\[[^][{}]*(?:\[[^][{}]*\][^][{}]*)*\]",
            lambda found: re.sub(r"\n *", " ", found[0]),
            text,
        )
        + "\n"
    )


if __name__ == "__main__":
    text = written(record())
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
