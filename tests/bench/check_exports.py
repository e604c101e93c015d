"""Compares what `tune --export` writes with the engines themselves. Run by hand, with the engines' sources:

    pip download --no-deps -d DIR vllm==0.33.0 sglang==0.5.23 mlx-lm==0.32.2 llama-cpp-python==0.3.36
    (unpack each into DIR/vllm, DIR/sglang, DIR/mlx_lm and DIR/llama)
    python tests/bench/check_exports.py DIR

It needs a virtual environment with the packages that these sources import (no GPU, no compiled parts; for mlx-lm `mlx[cpu]`). An
engine whose classes cannot be imported is compared by the names in its source. `test_export.py` needs none of this: it holds what
is written against the table `KNOWN`, which this script holds against the engines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specgen.tune.export import ENGINES, ExportedHead, export
from specgen.tune.outcome import Candidate


class Known(NamedTuple):
    """The names that we may write for an engine, the values of those that choose a method, and where they were looked up."""

    where: str
    names: frozenset[str]
    values: Mapping[str, frozenset[str]] = {}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KNOWN: Mapping[str, Known] = {
    "transformers": Known(
        "GenerationConfig, the installed transformers",
        _words(
            "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens "
            "max_matching_ngram_size"
        ),
        {"num_assistant_tokens_schedule": _words("heuristic heuristic_transient constant")},
    ),
    "vllm": Known(
        "vllm 0.33.0, vllm/config/speculative.py",
        _words(
            "--speculative-config method model num_speculative_tokens prompt_lookup_max prompt_lookup_min "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob"
        ),
        {"method": _words("ngram draft_model suffix eagle eagle3")},  # medusa is gone
    ),
    "sglang": Known(
        "sglang 0.5.23, sglang/srt/arg_groups/fields/spec.py",
        _words(
            "--model-path --speculative-algorithm --speculative-draft-model-path --speculative-num-steps "
            "--speculative-eagle-topk --speculative-num-draft-tokens"
        ),
        {"--speculative-algorithm": _words("EAGLE EAGLE3 STANDALONE NGRAM")},
    ),
    "tensorrt-llm": Known(
        "TensorRT-LLM 1.3, tensorrt_llm/llmapi/llm_args.py (its documentation writes DraftTarget, the class Draft_Target)",
        _words(
            "--config disable_overlap_scheduler speculative_config decoding_type max_draft_len speculative_model "
            "max_matching_ngram_size is_public_pool is_use_oldest use_dynamic_tree dynamic_tree_max_topK max_total_draft_tokens"
        ),
        {"decoding_type": _words("Draft_Target NGram Eagle3")},
    ),
    "llama.cpp": Known(
        "llama.cpp as in llama-cpp-python 0.3.36, common/arg.cpp and docs/speculative.md",
        _words(
            "-m -md --spec-type --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --spec-ngram-simple-size-n "
            "--spec-ngram-simple-size-m"
        ),
        {"--spec-type": _words("draft-simple draft-eagle3 ngram-simple")},
    ),
    "mlx": Known("mlx-lm 0.32.2, mlx_lm/generate.py", _words("--model --draft-model --num-draft-tokens")),
}

HEADS = {"eagle": ExportedHead("a head", "eagle3")}
TUNED = {
    "sd": {"k": 3},
    "heuristic": {"k": 2, "max_draft": 9},
    "confidence": {"threshold": 0.35, "max_draft": 9},
    "lookup": {"k": 6, "ngram": 2},
    "suffix": {"min_prob": 0.2},
    "eagle": {"width": 4, "nodes": 10, "k": 6},
}


def exported(engine: str) -> Iterator[tuple[str, str]]:
    """Yields each method that the engine has, with what is written for it. Names have characters that need quotes."""
    for name in ENGINES[engine].methods:
        settings: Any = {name: Candidate(name, TUNED[name], 9.0)}
        yield name, export(engine, settings, name, "org/a target", "org/the: draft", HEADS).text


def options(engine: str, text: str) -> dict[str, Any]:
    """Returns the names and values in an export: a command's options, and the keys of the JSON or YAML in it."""
    if engine == "transformers":
        found: dict[str, Any] = json.loads(text)
        return found
    if engine == "tensorrt-llm":
        command, _, document = text.partition("\n")
        content: dict[str, Any] = yaml.safe_load(document)
        return _of_command(command.partition(": ")[2]) | content | content["speculative_config"]
    given = _of_command(text)
    return given | json.loads(given.get("--speculative-config", "{}"))


def _of_command(text: str) -> dict[str, Any]:
    words = shlex.split(text)
    return {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if re.match(r"--?[a-z]", word)}


# how each engine itself takes what is written; each returns in words what it did


def _vllm(folder: Path, text: str) -> str:
    given = options("vllm", text)
    config = json.loads(given["--speculative-config"])
    if '"--speculative-config"' not in (folder / "vllm/vllm/engine/arg_utils.py").read_text():
        raise ValueError("there is no --speculative-config")
    sys.path.insert(0, str(folder / "vllm"))
    module = importlib.import_module("vllm.config.speculative")
    try:
        module.SpeculativeConfig(**config)
    except ImportError as error:  # raised after the fields' checks
        return f"parsed by SpeculativeConfig, which then asks for a package: {error}"
    except AttributeError:
        return "parsed by SpeculativeConfig, up to what needs the loaded target"
    return "parsed by SpeculativeConfig"


def _sglang(folder: Path, text: str) -> str:
    sys.path.insert(0, str(folder / "sglang"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(shlex.split(text)[2:])
    algorithms = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    algorithms.from_string(parsed.speculative_algorithm)
    return "parsed by ServerArgs' own options and SpeculativeAlgorithm"


def _mlx(folder: Path, text: str) -> str:
    sys.path.insert(0, str(folder / "mlx_lm"))
    importlib.import_module("mlx_lm.generate").setup_arg_parser().parse_args(shlex.split(text)[1:])
    return "parsed by mlx_lm.generate's own options"


def _llama_cpp(folder: Path, text: str) -> str:
    source = "".join(path.read_text() for path in sorted(folder.glob("llama/**/common/*.cpp")))
    given = options("llama.cpp", text)
    missing = [word for word in (*given, given["--spec-type"]) if f'"{word}"' not in source]
    if missing or not source:
        raise ValueError(f"not in common/*.cpp: {missing}")
    return "all names are in common/arg.cpp and common/speculative.cpp"


def _transformers(_: Path, text: str) -> str:
    from transformers import GenerationConfig

    config = GenerationConfig(**json.loads(text))
    config.validate(strict=True)
    return "parsed by GenerationConfig"


def _tensorrt_llm(_: Path, text: str) -> str:
    yaml.safe_load(text)
    return "a YAML document; its names are in the source, which needs CUDA to be imported"


CHECKS = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "llama.cpp": _llama_cpp,
    "mlx": _mlx,
}


def main() -> int:
    folder, failures = Path(sys.argv[1]), 0
    for engine, check in CHECKS.items():
        print(f"{engine} ({KNOWN[engine].where})")
        for name, text in exported(engine):
            try:
                print(f"  {name}: {check(folder, text)}")
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever an engine raises
                failures += 1
                print(f"  {name}: FAILED: {type(error).__name__}: {error}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
