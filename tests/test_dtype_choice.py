"""In which dtype a model is run, for measured seconds of its passes, its size and the memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_helpers import run_main
from families import make_model, save

from specgen.base.types import Context
from specgen.engine import dtype_choice
from specgen.engine.dtype_choice import choose_dtype, shortened_model
from specgen.engine.model_loading import ModelConfig, ModelSource, describe
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel

CPU = torch.device("cpu")
forward = NativeModel.forward


class Timer:
    """Gives scripted seconds for the passes of each dtype, which follow one another; float32 first."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls = seconds, 0
        self.threads: set[int] = set()

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.threads.add(torch.get_num_threads())
        self.calls += 1
        return self.seconds[(self.calls - 1) % len(self.seconds)]


@pytest.fixture
def bfloat16_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModelConfig]:
    """A model stored in bfloat16, too large for the cache."""
    save(make_model("qwen3"), tmp_path)
    config = describe(tmp_path, ModelSource(str(tmp_path)))
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    return tmp_path, replace(config, shape=replace(config.shape, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"), [(1.0, 0.5, torch.bfloat16), (1.0, 0.95, torch.float32), (1.0, 3.0, torch.float32)]
)
@pytest.mark.parametrize("native", [True, False])
def test_a_large_model_runs_in_16_bits_if_that_is_faster(
    bfloat16_model: tuple[Path, ModelConfig], float32: float, bfloat16: float, chosen: torch.dtype, native: bool
) -> None:
    folder, config = bfloat16_model
    timer = Timer(float32, bfloat16)
    architecture = config.architecture if native else None
    choice = choose_dtype("auto", config.shape, folder, CPU, architecture, timer=timer)
    assert choice.dtype == chosen
    assert f"{2e3 * bfloat16:.1f} ms in bfloat16, {2e3 * float32:.1f} in float32" in choice.reason
    assert timer.threads == {1}


def test_single_slow_samples_do_not_count(bfloat16_model: tuple[Path, ModelConfig]) -> None:
    folder, config = bfloat16_model
    timer = Timer(*[1.0, 0.5] * 4, *[1.0, 90.0] * 2, *[1.0, 0.5] * 2)
    assert choose_dtype("auto", config.shape, folder, CPU, config.architecture, timer=timer).dtype == torch.bfloat16


def test_nothing_is_timed_where_a_rule_decides(bfloat16_model: tuple[Path, ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = bfloat16_model

    def choose(name: str = "auto", device: torch.device = CPU, dtype: str = "bfloat16") -> tuple[torch.dtype, str]:
        shape = replace(config.shape, dtype=dtype)
        timer: Callable[..., float] = lambda _: pytest.fail("timed")  # noqa: E731
        choice = choose_dtype(name, shape, folder, device, config.architecture, timer=timer)
        return choice.dtype, choice.reason

    assert choose("float16") == (torch.float16, "chosen by --dtype")
    assert choose(dtype="float32") == (torch.float32, "the dtype of its weights")
    assert choose(device=torch.device("meta")) == (torch.bfloat16, "the dtype of its weights")
    monkeypatch.setattr(dtype_choice, "free_memory", lambda _: 1024)
    assert choose() == (torch.bfloat16, "in float32 the weights might not fit into memory")
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1 << 30)
    assert choose() == (torch.float32, "the model fits into the processor's cache")


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "olmo2"])
def test_a_shortened_model_has_one_layer_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    save(make_model(family), tmp_path)
    architecture = describe(tmp_path, ModelSource(str(tmp_path))).architecture
    assert architecture is not None
    for name, limit in (("_MLP_NUMBERS", 3 * 32 * 20), ("_HEADS_NUMBERS", 1), ("_TABLE_NUMBERS", 32 * 50)):
        monkeypatch.setattr(dtype_choice, name, limit)
    model = shortened_model(architecture, torch.bfloat16)
    short = model.architecture
    assert (len(model.layers), short.intermediate_size, short.vocab_size, short.num_kv_heads) == (1, 20, 50, 1)
    assert short.num_heads == architecture.num_heads // architecture.num_kv_heads
    assert ModelRunner(model).logits(Context([1, 2, 3]), [4]).logits.shape == (2, 50)


@pytest.mark.parametrize(
    ("asked", "bfloat16", "chosen"),
    [((), 0.5, "bfloat16"), (("--dtype", "auto"), 3.0, "float32"), (("--dtype", "float16"), 0, "float16")],
)
def test_the_chosen_dtype_is_the_one_that_is_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    asked: tuple[str, ...],
    bfloat16: float,
    chosen: str,
) -> None:
    """`auto`, the default, on a CPU, for weights in bfloat16 whose passes take half or three times as long as in float32."""
    folder = save(make_model("llama").to(torch.bfloat16), tmp_path)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setitem(choose_dtype.__kwdefaults__, "timer", Timer(1.0, bfloat16))
    run_in: list[torch.dtype] = []
    monkeypatch.setattr(NativeModel, "forward", lambda model, *given: run_in.append(model.dtype) or forward(model, *given))
    code, out, _ = run_main(monkeypatch, capfd, "generate", "-t", folder, "--device", "cpu", *asked, "--json", "-n", "4", "abc")
    assert code == 0
    assert json.loads(out.splitlines()[0])["dtype"] == chosen
    assert run_in[-1] == getattr(torch, chosen), "models that were only timed ran before"
