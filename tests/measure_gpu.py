"""Measure specgen on a GPU, stage by stage, with models of real shapes and random weights. Not a test.

    python tests/measure_gpu.py --out FOLDER [--resume] [--seconds 1500] [--stages versions,plain,...] [--device cuda] [--tiny]

Run from any folder, with specgen's dependencies installed; an H100's 80 GB hold all models. Each stage runs in a process of its
own, so that its errors do not end the others. After each, FOLDER/figures.json and FOLDER/table.txt hold all figures so far, and
the table begins with what they say about the goals. A second call with other stages adds to them; with --resume it runs those
that have no figures yet. `--device cpu --tiny` runs everything with tiny shapes and emulated graphs, as a check of the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_LONGEST = 400.0  # seconds of one stage
_SHORTEST = 20.0  # seconds under which no further stage is started
_MARK = "@figures "  # begins the lines in which a stage reports its figures


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT)]
    if options.inside:
        return _inside(options)
    stages = options.stages.split(",") if options.stages else _names()
    if unknown := set(stages) - set(_names()):
        print(f"no stage {', '.join(sorted(unknown))}; there are: {', '.join(_names())}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        done = {name for name, found in _known(options.out).items() if not {"error", "skipped"} & found.keys()}
        stages = [stage for stage in stages if stage not in done]
    deadline = time.monotonic() + options.seconds
    for stage in stages:
        left = deadline - time.monotonic()
        start = time.monotonic()
        figures = {"skipped": "no time left"} if left < _SHORTEST else _run(stage, options, min(left, _LONGEST))
        taken = round(time.monotonic() - start, 1)
        print(f"{stage}: {taken} s{', with an error' if 'error' in figures else ''}", file=sys.stderr, flush=True)
        _add(options, stage, figures | {"stage_seconds": taken})
    print((options.out / "table.txt").read_text(encoding="utf-8"))
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", help="names separated by commas; all by default", default="")
    parser.add_argument("--resume", action="store_true", help="leave out the stages that have figures without an error")
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--here", action="store_true", help="run the stages in this process")
    parser.add_argument("--inside", help=argparse.SUPPRESS, default="")
    return parser


def _names() -> list[str]:
    from gpu_stages import STAGES

    return list(STAGES)


def _run(stage: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs one stage. Returns its figures, and under `error` why they are not all."""
    if options.here:
        return _figures(stage, options)
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device, "--inside", stage]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [*command, *(["--tiny"] if options.tiny else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
        ended = f"exit code {process.returncode}: {errors[-3000:]}"
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        ended = f"ended after {seconds:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK)) if lines else {}
    return found if found.pop("is_complete", False) else {"error": ended, **found}


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it has started: they would keep the GPU busy."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _inside(options: argparse.Namespace) -> int:
    _report(_figures(options.inside, options) | {"is_complete": True})
    return 0


def _report(figures: Mapping[str, Any]) -> None:
    print(f"\n{_MARK}{json.dumps(figures)}", flush=True)


def _figures(stage: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from gpu_bench import Bench
    from gpu_models import FULL, SMALL
    from gpu_stages import STAGES

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
    bench = Bench(device, SMALL if options.tiny else FULL, _report if options.inside else lambda _: None)
    try:
        with torch.inference_mode(False):
            STAGES[stage](bench)
    except Exception:  # noqa: BLE001  the other stages are to run
        return {"error": traceback.format_exc()[-4000:], **bench.figures}
    return dict(bench.figures)


def _known(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "figures.json"
    known: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def _add(options: argparse.Namespace, stage: str, figures: dict[str, Any]) -> None:
    """Adds a stage's figures to the files."""
    from gpu_verdicts import verdicts

    out = options.out
    known = _known(out) | {stage: figures}
    (out / "figures.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
    title = "[goals] for tiny shapes, so they say nothing about a GPU" if options.tiny else "[goals]"
    lines = [title, *(f"  {line}" for line in verdicts(known))]
    for name, found in known.items():
        lines.append(f"[{name}]")
        lines += [f"  {key:44} {_shown(value)}" for key, value in found.items()]
    (out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\n", "\n" + " " * 6)


if __name__ == "__main__":
    sys.exit(main())
