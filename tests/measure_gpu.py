"""Measure specgen on a GPU, stage by stage, with models of real shapes and random weights. Not a test.

    python tests/measure_gpu.py --out FOLDER [--stages versions,plain,...] [--seconds 1500] [--device cuda] [--tiny]

Each stage runs in a process of its own, so that its errors do not end the others. After each, FOLDER/figures.json and
FOLDER/table.txt hold all figures so far. A second call with other stages adds to them. `--device cpu --tiny` runs everything
with tiny shapes and emulated graphs, as a check of the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LONGEST = 400.0  # seconds of one stage
_SHORTEST = 20.0  # seconds under which no further stage is started


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    if options.inside:
        return _inside(options)
    stages = options.stages.split(",") if options.stages else _names()
    if unknown := set(stages) - set(_names()):
        print(f"no stage {', '.join(sorted(unknown))}; there are: {', '.join(_names())}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    for stage in stages:
        left = deadline - time.monotonic()
        start = time.monotonic()
        figures = {"skipped": "no time left"} if left < _SHORTEST else _run(stage, options, min(left, _LONGEST))
        _add(options.out, stage, figures | {"stage_seconds": round(time.monotonic() - start, 1)})
    print((options.out / "table.txt").read_text(encoding="utf-8"))
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", help="names separated by commas; all by default", default="")
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
    """Runs one stage. Returns its figures, or under `error` why there are none."""
    if options.here:
        return _figures(stage, options)
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device, "--inside", stage]
    try:
        done = subprocess.run(
            [*command, *(["--tiny"] if options.tiny else [])], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"ended after {seconds:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"exit code {done.returncode}: {done.stderr[-3000:]}"}
    return found


def _inside(options: argparse.Namespace) -> int:
    print("\n" + json.dumps(_figures(options.inside, options)))
    return 0


def _figures(stage: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from gpu_models import FULL, SMALL
    from gpu_stages import STAGES, Bench

    try:
        with torch.inference_mode(False):
            device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
            return STAGES[stage](Bench(device, SMALL if options.tiny else FULL))
    except Exception:  # noqa: BLE001  the other stages are to run
        return {"error": traceback.format_exc()[-4000:]}


def _add(out: Path, stage: str, figures: dict[str, Any]) -> None:
    """Adds a stage's figures to the files."""
    path = out / "figures.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[stage] = figures
    path.write_text(json.dumps(known, indent=1), encoding="utf-8")
    lines = []
    for name, found in known.items():
        lines.append(f"[{name}]")
        lines += [f"  {key:44} {_shown(value)}" for key, value in found.items()]
    (out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\n", "\n" + " " * 6)


if __name__ == "__main__":
    sys.exit(main())
