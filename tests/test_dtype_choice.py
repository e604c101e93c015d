"""In which dtype a model is run, for measured seconds of its products, its size and the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from families import BACKENDS, make_model, save

from specgen.engine import dtype_choice
from specgen.engine.dtype_choice import choose_dtype
from specgen.engine.model_loading import ModelSource, PreparedModel, describe

CPU = torch.device("cpu")


def clock(bfloat16: float) -> Any:
    """Gives float32's products one second and bfloat16's so many, after it ran all of them; of three turns two are disturbed."""

    def timed(work: Any, *_: object, **__: object) -> Any:
        assert torch.get_num_threads() == 1
        assert {run() is None for run in work.values()} == {False}
        return {key: [90.0, 1.0 if key[0] == torch.float32 else bfloat16, 90.0] for key in work}

    return timed


def stored_in_bfloat16(folder: Path, backend: str = "auto") -> PreparedModel:
    save(make_model("qwen3").to(torch.bfloat16), folder)
    return describe(folder, ModelSource(str(folder), backend=backend))


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, torch.bfloat16), (0.95, torch.float32), (3.0, torch.float32)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_model_runs_in_16_bits_if_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, chosen: torch.dtype, backend: str
) -> None:
    model = stored_in_bfloat16(tmp_path, backend)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setattr(dtype_choice, "timed", clock(seconds))
    choice = choose_dtype("auto", model, CPU)
    assert choice.dtype == chosen
    assert f"{2e3 * seconds:.1f} ms in bfloat16, 2000.0 in float32 (1 and 6 tokens)" in choice.reason


def test_nothing_is_timed_where_a_rule_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(dtype_choice, "timed", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)

    def choose(name: str = "auto", device: torch.device = CPU, dtype: str = "bfloat16") -> tuple[torch.dtype, str]:
        choice = choose_dtype(name, replace(model, shape=replace(model.shape, dtype=dtype)), device)
        return choice.dtype, choice.reason

    assert choose("float16") == (torch.float16, "chosen by --dtype")
    assert choose(dtype="float32") == (torch.float32, "the dtype of its weights")
    assert choose(device=torch.device("meta")) == (torch.bfloat16, "the dtype of its weights")
    monkeypatch.setattr(dtype_choice, "free_memory", lambda _: 1024)
    assert choose() == (torch.bfloat16, "in float32 the weights might not fit into memory")
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1 << 30)
    assert choose() == (torch.float32, "the model fits into the processor's cache")


@pytest.mark.parametrize(
    ("asked", "seconds", "chosen"),
    [((), 0.5, "bfloat16"), (("--dtype", "float16"), 0, "float16")],
)
def test_the_chosen_dtype_is_the_one_that_is_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    asked: tuple[str, ...],
    seconds: float,
    chosen: str,
) -> None:
    """`auto`, the default, on a CPU, for weights in bfloat16 whose products take half or three times as long as in float32."""
    stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setattr(dtype_choice, "timed", clock(seconds))
    named = ("-t", str(tmp_path), "--device", "cpu", *asked)
    code, out, _ = run_main(monkeypatch, capfd, "generate", *named, "--json", "-n", "4", "abc")
    assert code == 0
    assert json.loads(out.splitlines()[0])["dtype"] == chosen
