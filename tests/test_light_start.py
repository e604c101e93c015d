"""What the command line, the commands and the draft worker import for a model that runs on
specgen's own engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import specgen
from specgen import demo
from specgen.engine import weights
from specgen.engine.native.config_reading import read_config
from specgen.engine.text.tokenizer import load_tokenizer

HEAVY = {
    "transformers",
    "huggingface_hub",
    "jinja2",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "prompt_toolkit",
}
NOT_FOR_HELP = {
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pydantic",
    "specgen.methods",
}
# by a generation without a profile
UNUSED = {"specgen.pair.profile", "specgen.traces.reader", "specgen.tune.outcome"}
IN_WORKER = {"typer", "rich", "pydantic"}
TRACE = Path(__file__).parent / "golden" / "trace.jsonl"
PAIR = ("--target", str(demo.folder("target")), "--draft", str(demo.folder("draft")))


COMMANDS = """
import json, sys
from specgen.cli.app import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["specgen", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, arguments
    print(json.dumps([*sys.modules]), file=sys.stderr)
"""


def imported(code: str, *arguments: str) -> list[set[str]]:
    """The modules that a program has imported each time that it lists them, on a line of stderr."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=120
    )
    return [set(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(
    "commands",
    [
        [
            (("--help",), NOT_FOR_HELP),
            (("inspect", "-q", str(TRACE)), {"torch"}),
        ],
        [
            (("generate", "def f(", "-q", "-n", "2", "-m", "eesd"), HEAVY | UNUSED),
            (("inspect", "-q", *PAIR), HEAVY),
            (
                ("compare", "-m", "ar,svip", "-q", "--limit", "1", "--repeats", "1", "-n", "2"),
                HEAVY,
            ),
        ],
        # the folder of its cache
        [
            (
                ("generate", "def f(", "-q", "-n", "2", *PAIR[:2]),
                HEAVY - {"huggingface_hub"} | UNUSED,
            )
        ],
    ],
    ids=["without torch", "on the pair", "generate with what is found"],
)
def test_a_command_imports_no_library_that_it_does_not_need(
    commands: list[tuple[tuple[str, ...], set[str]]],
) -> None:
    """Nor do those before it in the same process."""
    seen = imported(COMMANDS, json.dumps([arguments for arguments, _ in commands]))
    for modules, (arguments, unneeded) in zip(seen, commands, strict=True):
        assert modules.isdisjoint(unneeded), arguments
        assert "torch" in modules | unneeded


def test_the_draft_worker_imports_no_more_than_it_needs() -> None:
    (seen,) = imported(
        "import specgen.workers.server, specgen.engine.native.native_model, json, sys\n"
        "print(json.dumps([*sys.modules]), file=sys.stderr)"
    )
    assert "torch" in seen
    assert seen.isdisjoint(HEAVY | IN_WORKER)


def test_the_list_of_tensors_is_not_read_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, *args, **options)

    monkeypatch.setattr(weights, "safe_open", counted)
    with specgen.load(str(demo.folder("target")), device="cpu", dtype="float32") as pair:
        assert pair.target.files.shape.num_layers == 12
    assert 0 < len(opened) <= 5


def test_a_special_token_is_found_without_a_dictionary_of_the_vocabulary() -> None:
    """Which takes 40 ms of a start with a vocabulary of 50,000 tokens."""

    def refused() -> dict[str, int]:
        raise AssertionError("the dictionary is built")

    folder = demo.folder("target")
    tokenizer = replace(
        load_tokenizer(folder, read_config(folder, "the demo"), False), vocabulary=refused
    )
    assert tokenizer.special_id(" </s>\n") == 2
    assert tokenizer.special_id("</s><s>") is None
    assert tokenizer.special_id("a") is None, "an ordinary token is found"
