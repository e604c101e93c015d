"""Makes the fuzzer's cases. A case is known by its part, a seed and a number: `make_case` always makes the same one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import fuzz_commands as commands
import fuzz_inputs as inputs
from fuzz_commands import Case
from fuzz_materials import Materials


def _options(rng: Random, case: Case) -> None:
    case.args = commands.command_line(rng, case)


def _outputs(rng: Random, case: Case) -> None:
    """Commands that have nothing wrong but their outputs: special files, links, each other, or what is read."""
    traced, prompts, out = case.folder / "in" / "trace.jsonl", case.folder / "in" / "p.jsonl", case.folder / "out"
    traced.write_text(rng.choice(case.materials.traces), encoding="utf-8")
    prompts.write_text('{"prompt": "hello"}\n')
    (out / "hard").hardlink_to(out / "old.html")
    (out / "trace").symlink_to(traced)
    model = Path(shutil.copytree(case.materials.draft, case.folder / "in" / "weights"))
    special = [case.folder / "dev" / "null", case.folder / "dev" / "full", out / "fifo"]
    plain = [out / name for name in ("new", "x", "old.html", "hard", "link", "dangling")]
    command = rng.choice(("inspect", "inspect", "inspect", "inspect", "generate", "compare"))
    weights = [model / name for name in ("model.safetensors", "config.json")]
    read = {"inspect": [traced, out / "trace"], "generate": weights, "compare": [prompts, *weights]}[command]
    options = {"inspect": ["--html"], "generate": ["--trace"], "compare": ["--trace", "--csv", "--svg", "--html"]}[command]
    models = ["-t", str(model), "--device", "cpu"]
    case.args = [command, *{"inspect": [str(traced)], "generate": ["abc", "-m", "ar", "-n", "2", *models]}.get(command, [])]
    if command == "compare":
        case.args += [*models, "--prompts", str(prompts), "-m", "ar", "-n", "2", "--repeats", "1"]
    for option in rng.sample(options, rng.randrange(1, len(options) + 1)):
        path = rng.choice(rng.choice((special, plain, read)))
        case.outputs += [path, *([out / "hard", out / "old.html"] if path in plain else [])] if path not in read else []
        case.args += [option, str(path) if rng.random() < 0.7 else os.path.relpath(path, case.folder)]


def _prompts(rng: Random, case: Case) -> None:
    path = inputs.prompts(rng, case.folder / "in")
    command = rng.choice(("compare", "compare", "compare", "compare", "tune"))
    case.args = [command, *commands.pair_of(rng, case), "--prompts", str(path), "-n", "2"]
    case.args += ["--limit", "2", *(("-q",) if rng.random() < 0.8 else ()), *(("--category", "c") if rng.random() < 0.2 else ())]
    if command == "compare":
        case.args += ["--repeats", "1", "-m", rng.choice(("ar", "lookup", "sd")), *(["--turns"] if rng.random() < 0.3 else [])]
        case.args += rng.choice(((), ("--json",), ("--by-category",), ("--csv", str(case.folder / "out" / "t.csv"))))
        case.outputs.append(case.folder / "out" / "t.csv")
    elif rng.random() < 0.8:
        case.args += ["--train", "--steps", "1", "--window", "16", "--batch-size", "2"]
        case.args += ["--out", str(case.folder / "out" / "trained")]
        case.args += ["--corpus", str(path)] if rng.random() < 0.5 else []
        case.outputs.append(case.folder / "out" / "trained")
    else:
        case.args += ["--budget", "0.2", "--json"]


def _traces(rng: Random, case: Case) -> None:
    to_resume = rng.random() < 0.3
    comparisons = [text for text in case.materials.traces if '"spec"' in text and '"pearl"' not in text.split("\n", 1)[0]]
    sources = comparisons if to_resume and rng.random() < 0.9 else case.materials.traces
    path = inputs.trace(rng, case.folder / "in", sources)
    if not to_resume:
        case.args = ["inspect", str(path)]
        if rng.random() < 0.3:
            case.args.append(str(inputs.trace(rng, case.folder / "in", case.materials.traces)))
        page = case.folder / "out" / "p.html"
        case.args += rng.choice(((), ("--json",), ("--html", str(page)), ("--rounds", "2"), ("--run", "2")))
        case.outputs.append(page)
    else:
        case.args = ["compare", *commands.pair_of(rng, case), "--resume", str(path)]
        case.args += ["--prompts", commands.prompts_file(rng, case)]
        case.args += ["-n", "6", "--repeats", "1", *rng.choice(((), ("--json",), ("-m", "sd"), ("-m", "lookup", "--predict")))]
        case.outputs.append(path)


def _profiles(rng: Random, case: Case) -> None:
    path = inputs.profile(rng, case.folder / "in" / "profile", case.materials.profile_values)
    command = rng.choice(("generate", "generate", "generate", "compare", "compare", "tune"))
    case.args = [command, *commands.pair_of(rng, case), *(["abc"] if command == "generate" else [])]
    if command == "tune":
        case.args += ["--out", str(path), "--export", rng.choice(("vllm", "transformers", "mlx")), "--budget", "0.2"]
        case.args += ["--prompts", commands.prompts_file(rng, case)]
        case.outputs.append(path)
    else:
        case.args += ["--profile", str(path), "-n", "3", *rng.choice(((), ("--json",), ("-q",)))]
    if command == "compare":
        case.args += ["-m", "svip,sd", "--prompts", commands.prompts_file(rng, case), "--repeats", "1"]


def _configs(rng: Random, case: Case) -> None:
    which = rng.choice(inputs.MODEL_FILES)
    _with_model(rng, case, which)


def _weights(rng: Random, case: Case) -> None:
    _with_model(rng, case, "model.safetensors")


def _with_model(rng: Random, case: Case, which: str) -> None:
    made = case.materials
    source = rng.choice((made.target, made.target, *made.families.values()))
    folder = inputs.model_folder(rng, case.folder / "in" / "model", source, which)
    as_draft = ["-t", str(made.target), "-d", str(folder)]
    models = rng.choice((["-t", str(folder)], as_draft, ["-t", str(folder), "-d", str(source)]))
    command = rng.choice(("generate", "generate", "generate", "compare", "inspect"))
    case.args = [command, *models, "--device", "cpu", *(["abc abc"] if command == "generate" else [])]
    if command == "generate":
        sampled = ("--temperature", "1", "--seed", "1")
        case.args += ["-n", "4", *rng.choice(((), ("--json",), ("--rounds",), ("-m", "lookup"), sampled))]
        if which == "chat_template.jinja" or rng.random() < 0.1:
            case.args += ["--chat", *(["--system", "x"] if rng.random() < 0.5 else [])]
    if command == "compare":
        case.args += ["-n", "3", "--repeats", "1", "--prompts", commands.prompts_file(rng, case), "-m", "lookup"]
    if rng.random() < 0.2:
        case.args += ["--backend", rng.choice(("native", "transformers"))]


def _exits(rng: Random, case: Case) -> None:
    made = case.materials
    path = inputs.exit_layer(rng, case.folder / "in" / "exit", made.exit_layer)
    method = rng.choice(("eesd", "eesd-fixed", "eesd-beta", "eesd-cali", "eesd-tree"))
    case.args = ["generate", "abc", "-t", str(made.target), "--device", "cpu", "-n", "4", "-m", method, "--exit-layer", str(path)]
    case.args += rng.choice(((), ("--json",), ("--backend", "transformers"), ("-q",)))


def _environment(rng: Random, case: Case) -> None:
    if rng.random() < 0.2:
        case.args = rng.choice((["--help"], [], ["compare", "--help"], ["inspect", "--methods"], ["--version"], ["tune", "-h"]))
    else:
        case.args = commands.command_line(rng, case, count=rng.choice((0, 0, 1, 2)))
    case.environment = commands.environment(rng, case, rng.choice((1, 2, 4)))
    case.is_terminal = rng.random() < 0.6


PARTS: Mapping[str, Callable[[Random, Case], None]] = {
    "options": _options,
    "outputs": _outputs,
    "prompts": _prompts,
    "traces": _traces,
    "profiles": _profiles,
    "configs": _configs,
    "weights": _weights,
    "exits": _exits,
    "environment": _environment,
}


def make_case(part: str, seed: int, number: int, folder: Path, materials: Materials) -> Case:
    rng = Random(f"{part} {seed} {number}")
    case = Case(part, folder, materials)
    case.make_folders()
    PARTS[part](rng, case)
    if part != "environment" and rng.random() < 0.15:
        case.environment = commands.environment(rng, case, 1)
        case.is_terminal = rng.random() < 0.5
    if case.args[:1] == ["generate"] and rng.random() < 0.05:
        case.args = [arg for arg in case.args if arg not in ("abc", "abc abc", "hello abc abc")]
        case.stdin = rng.choice((b"", b"abc\n", b"\xff\xfe", b"\x00", b"a" * 5000, "é".encode(), b"\n\n", b"\x1b[2J"))
    return case
