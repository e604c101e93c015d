"""The wheel: it has everything that the package needs, and works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

import specgen

ROOT = Path(specgen.__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
import specgen
from specgen.compare.prompts import load_prompts
assert Path(specgen.__file__).is_relative_to(sys.argv[1]), specgen.__file__
print(len(load_prompts(None)))
with specgen.load(device="cpu", dtype="float32") as pair:
    for method in ("sd", "eesd-cali"):
        sampling = specgen.SamplingParams(max_new_tokens=4)
        print(pair.generate("def add(a, b):", method, sampling).text.strip())
"""


def files(folder: Path) -> dict[str, bytes]:
    found = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_the_wheel_has_the_package_and_the_prompts_and_nothing_else_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    monkeypatch.chdir(ROOT)  # as a build front end does
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        wheel.extractall(installed)
    found = files(installed / "specgen")
    assert found.pop("examples.yaml") == (ROOT / "examples.yaml").read_bytes()
    assert found == files(ROOT / "specgen")
    parts = (
        "demo/target/model.safetensors",
        "demo/draft/model.safetensors",
        "demo/exit/exit.safetensors",
    )
    assert set(parts) <= set(found)
    assert any(name.endswith(".html.j2") for name in found)
    assert {folder.name for folder in installed.iterdir()} == {
        "specgen",
        "specgen_cli-0.1.0.dist-info",
    }
    entry_points = (
        (installed / "specgen_cli-0.1.0.dist-info" / "entry_points.txt").read_text().split()
    )
    assert entry_points == ["[console_scripts]", "specgen", "=", "specgen.__main__:start"]
    command = [sys.executable, "-c", PROGRAM, str(installed)]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    prompts, drafted, early = done.stdout.splitlines()
    assert int(prompts) == 36
    assert drafted == early != ""
