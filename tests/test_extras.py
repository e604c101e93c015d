"""Packages that only some uses need: without one, a line says so and names the extra to install."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from processes import Forked

import specgen
from specgen import demo

ROOT = Path(specgen.__file__).parents[1]


def line_without(package: str, *arguments: str) -> str:
    """The one line with which a command ends where this package is not installed."""
    process = Forked(*arguments, missing=[package])
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, b""), err
    (line,) = err.decode().splitlines()
    return line


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = [
        (ROOT / "README.md").read_text(),
        *(path.read_text() for path in Path(specgen.__file__).parent.rglob("*.py")),
    ]
    named = set(re.findall(r'pip install -e "\.\[([\w-]+)\]"', "\n".join(texts)))
    assert (
        {"gguf", "energy", "multi-gpu", "quantised", "serve", "grammar"} <= named <= extras.keys()
    )
    assert not re.search(r"pip install specgen|specgen\[", "\n".join(texts)), (
        "the name on the index is another project's"
    )


def test_quantised_weights_without_their_package(tmp_path: Path) -> None:
    folder = shutil.copytree(demo.folder("target"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": "int8_weight_only"}
    (folder / "config.json").write_text(json.dumps(config))
    line = line_without("torchao", "generate", "-t", str(folder), "-d", "none", "x")
    assert line.startswith("error: ")
    assert 'pip install -e ".[quantised]"' in line


def test_answers_with_a_shape_without_their_package() -> None:
    line = line_without("llguidance", "generate", "--regex", "[0-9]+", "x")
    assert line == (
        "error: answers that keep to a grammar need llguidance, which is not installed. "
        'Install it with pip install -e ".[grammar]"'
    )


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_gguf_file_that_only_transformers_runs_without_its_packages(
    tmp_path: Path, missing: str
) -> None:
    writer = pytest.importorskip("gguf").GGUFWriter(tmp_path / "model.gguf", "mpt")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    line = line_without(missing, "generate", "-t", str(tmp_path / "model.gguf"), "x")
    assert 'pip install -e ".[gguf]"' in line


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_the_server_without_its_packages(missing: str) -> None:
    line = line_without(missing, "serve", "--port", "0")
    assert line.startswith("error: ")
    assert missing in line
    assert 'pip install -e ".[serve]"' in line
