"""Starts the programs that a measurement compares, each in a process of its own, and lets them take
turns."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from specgen.base.machine import WAIT_PASSIVELY

HERE = Path(__file__).resolve().parent
# no program is to use instructions beyond AVX2
AVX2_ALONE = {
    "SPECGEN_KERNELS": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}

# how specgen holds weights, and llama.cpp's type with the same values
SAME_VALUES = {"stored": "F16", "int8": "Q8_0", "file": "Q4_1"}
REFERENCE = "Q8_0"  # the other ratios compare with llama.cpp's plain decoding with these weights

Answers = dict[str, list[dict[str, Any]]]  # a way's name -> its answers, prompt by prompt


class Program:
    """A program of `decoding_worker.py`, in a process of its own."""

    def __init__(
        self,
        program: str,
        options: Mapping[str, object],
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(HERE / "decoding_worker.py"), json.dumps([program, options])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_without_threads(os.environ), **environment},
        )
        self.description: dict[str, Any] = self._answer()

    def ask(self, call: str, **arguments: object) -> Any:
        """Returns what the function `call` of the program returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([call, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace")
            raise SystemExit(f"{self._process.args!r} ended:\n{printed[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding: a program's `name` of it."""

    program: Program
    name: str


class Programs:
    """Starts programs as the options say, and closes them at the end of a `with` block."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._threads: int = options.threads
        self._environment = dict(AVX2_ALONE) if options.avx2 else {}
        self._stack = ExitStack()
        self.llama_builds = dict(map(_named, options.llama))
        if not options.llama and find_spec("llama_cpp") is not None:
            self.llama_builds = {"llama.cpp": ""}  # the installed one
        self._openvino_python: str = options.openvino_python

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def specgen(self, model: object, dtype: str = "auto", **options: object) -> Program:
        # as the command does
        environment = {**WAIT_PASSIVELY, "OMP_NUM_THREADS": str(self._threads)}
        return self._start("specgen", {"model": str(model), "dtype": dtype, **options}, environment)

    def transformers(self, model: object, dtype: str) -> Program:
        options = {"model": str(model), "dtype": dtype, "threads": self._threads}
        return self._start("transformers", options, {"OMP_NUM_THREADS": str(self._threads)})

    def llama(self, build: str, model: object, **options: object) -> Program:
        """`build` is a name in `llama_builds`; `options` are those of the worker."""
        path = self.llama_builds[build]
        environment = {"PYTHONPATH": path} if path else {}
        given = {"model": str(model), "threads": self._threads, **options}
        return self._start("llama.cpp", given, environment)

    def openvino(self, model: object, ends: Sequence[int]) -> Program:
        if self._environment:
            # its plugin chooses kernels by the processor, and then oneDNN has none for them
            raise SystemExit("OpenVINO cannot be held to AVX2: leave out --openvino or --avx2")
        options = {"model": str(model), "threads": self._threads, "ends": list(ends)}
        return self._start("openvino", options, {}, self._openvino_python)

    def _start(
        self,
        program: str,
        options: Mapping[str, object],
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> Program:
        started = Program(program, options, {**self._environment, **environment}, python)
        self._stack.callback(started.close)
        print(f"{Path(str(options['model'])).name}: {started.description}", file=sys.stderr)
        return started


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `Programs` reads."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--avx2", action="store_true", help="no instructions beyond AVX2; llama.cpp as it was built"
    )
    parser.add_argument(
        "--llama",
        action="append",
        default=[],
        metavar="[NAME=]FOLDERS",
        help="where llama_cpp and what it needs are installed (between colons; several builds may "
        "be named); without it, the installed one, if any",
    )
    parser.add_argument(
        "--openvino-python", default=sys.executable, help="a Python that has openvino_genai"
    )


def _without_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what sets OpenMP's threads: each program has its own."""
    return {name: value for name, value in environment.items() if not name.startswith("OMP_")}


def _named(text: str) -> tuple[str, str]:
    name, _, folders = text.rpartition("=")
    return f"llama.cpp {name}".rstrip(), folders


def middle_and_range(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measure(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    *,
    count: int,
    to_end: bool,
) -> Answers:
    """Returns the answers of each way, for each repeat and prompt, in turn. An answer has at least
    two tokens, or no speed."""
    answers: Answers = defaultdict(list)
    for _ in range(repeats):
        for prompt in prompts:
            for name, way in ways.items():
                answer = way.program.ask(
                    "decode", prompt=list(prompt), count=count, way=way.name, to_end=to_end
                )
                answers[name].append(answer)
    return answers


def speed(answer: Mapping[str, Any]) -> float:
    """Returns the tokens/s after the first token."""
    return (len(answer["ids"]) - 1) / answer["seconds"]


def show(group: str, prompts: Sequence[Sequence[int]], answers: Answers) -> None:
    lengths = sorted(len(prompt) for prompt in prompts)
    print(f"\n{group}: {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens")
    print(
        f"{'':34} {'tokens/s':>22} {'same values':>20} {REFERENCE:>20} {'prompt/s':>9} "
        f"{'tokens':>7}"
    )
    for name, own in answers.items():
        same = SAME_VALUES.get(name.rpartition(", ")[2]) if name.startswith("specgen") else None
        speeds = middle_and_range(map(speed, own), 1)
        reading = median(
            len(prompts[index % len(prompts)]) / answer["prompt_seconds"]
            for index, answer in enumerate(own)
        )
        length = sum(len(answer["ids"]) for answer in own) / len(own)
        print(
            f"{name:34} {speeds:>22} {ratio(own, answers, same):>20} "
            f"{ratio(own, answers, REFERENCE):>20} {reading:9.0f} {length:7.1f}",
            flush=True,
        )


def ratio(own: Sequence[Mapping[str, Any]], answers: Answers, kind: str | None) -> str:
    """Returns the ratio of speeds to those of llama.cpp's first build with weights of the `kind`,
    as text."""
    names = [name for name in answers if name.startswith("llama.cpp") and name.endswith(str(kind))]
    if not names:
        return ""
    return middle_and_range(
        speed(answer) / speed(other) for answer, other in zip(own, answers[names[0]], strict=True)
    )
