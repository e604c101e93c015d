"""Checks that the engines accept what `tune --export` writes (`golden/exports.json`). Run by hand,
with the engines' sources:

    pip download --no-deps -d DIR vllm==0.33.0 sglang==0.5.23 mlx-lm==0.32.2 mlx-vlm==0.7.10
    pip download --no-deps --no-binary :all: -d DIR llama-cpp-python==0.3.36
    (unpack each into DIR/vllm, DIR/sglang, DIR/mlx_lm, DIR/mlx_vlm and DIR/llama)
    python tests/bench/check_exports.py DIR

It needs a virtual environment with the packages that these sources import (no GPU, no compiled
parts; for the two of MLX `mlx[cpu]`). TensorRT-LLM (1.3, tensorrt_llm/llmapi/llm_args.py) needs
CUDA to be imported: its names were compared by reading, as were those of LM Studio's `lms load`.
Modelfiles are checked in `test_export.py`, and programs for transformers run there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any


def _vllm(folder: Path, text: str) -> str:
    words = shlex.split(text)
    if "--speculative-config" not in words:
        return "plain"
    config = json.loads(words[-1])
    if '"--speculative-config"' not in (folder / "vllm/vllm/engine/arg_utils.py").read_text():
        raise ValueError("there is no --speculative-config")
    sys.path.insert(0, str(folder / "vllm"))
    module = importlib.import_module("vllm.config.speculative")
    unknown = config.keys() - {field.name for field in dataclasses.fields(module.SpeculativeConfig)}
    if unknown:
        raise ValueError(f"SpeculativeConfig has no {unknown}")
    try:
        module.SpeculativeConfig(**config)
    except ImportError as error:  # raised after the fields' checks
        return f"parsed by SpeculativeConfig, which then asks for a package: {error}"
    except (AttributeError, ValueError) as error:
        if not isinstance(error, AttributeError) and "target_model_config" not in str(error):
            raise
        return "parsed by SpeculativeConfig, up to what needs the loaded target"
    return "parsed by SpeculativeConfig"


def _sglang(folder: Path, text: str) -> str:
    sys.path.insert(0, str(folder / "sglang"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(shlex.split(text)[2:])
    algorithms = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    found = algorithms.from_string(parsed.speculative_algorithm)
    return f"parsed by ServerArgs' own options, as {found}"


def _mlx(folder: Path, text: str) -> str:
    sys.path.insert(0, str(folder / "mlx_lm"))
    importlib.import_module("mlx_lm.generate").setup_arg_parser().parse_args(shlex.split(text)[1:])
    return "parsed by mlx_lm.generate's own options"


def _mlx_vlm(folder: Path, text: str) -> str:
    sys.path.insert(0, str(folder / "mlx_vlm"))
    dispatch = importlib.import_module("mlx_vlm.generate.dispatch")
    words, sys.argv = sys.argv, shlex.split(text)
    try:
        parsed = dispatch.parse_arguments()
    finally:
        sys.argv = words
    drafters = importlib.import_module("mlx_vlm.speculative.drafters")
    if parsed.draft_kind not in (None, *drafters.KNOWN_DRAFTER_KINDS):
        raise ValueError(f"there are no drafters of the kind {parsed.draft_kind}")
    return f"parsed by mlx_vlm.generate's own options, as {parsed.draft_kind}"


def _llama_cpp(folder: Path, text: str) -> str:
    source = "".join(path.read_text() for path in sorted(folder.glob("llama/**/common/*.cpp")))
    words = shlex.split(text)
    named = [word for word in words if word.startswith("-")]
    if "--spec-type" in words:
        named += words[words.index("--spec-type") + 1].split(",")
    missing = [word for word in named if f'"{word}"' not in source]
    if missing or not source:
        raise ValueError(f"not in common/*.cpp: {missing}")
    return "all names are in common/arg.cpp and common/speculative.cpp"


CHECKS = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "mlx": _mlx,
    "mlx-vlm": _mlx_vlm,
}


def main() -> int:
    golden: dict[str, Any] = json.loads(
        (Path(__file__).parents[1] / "golden" / "exports.json").read_text()
    )
    failures = 0
    for engine, check in CHECKS.items():
        for label, made in golden[engine].items():
            if "text" not in made:
                continue
            try:
                print(f"{engine}, {label}: {check(Path(sys.argv[1]), made['text'])}")
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever an engine raises
                failures += 1
                print(f"{engine}, {label}: FAILED: {type(error).__name__}: {error}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
