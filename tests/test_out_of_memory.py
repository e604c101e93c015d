"""A device that runs out of memory: one line and exit code 1, wherever it happens; comparisons
continue with other methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_helpers import parsed, run_main

from specgen.decoding.chain import ModelDrafter
from specgen.engine.native.native_model import NativeModel

ERRORS = [  # as Python, torch's allocators and an accelerator's driver raise them
    MemoryError(),
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has 1 MiB free."
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9 bytes"
    ),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
]
ON_CPU = ("--device", "cpu", "--dtype", "float32")


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:12])
def test_it_is_one_line_and_exit_code_1(
    pair: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """In a pass, and while weights are loaded, which names the model and the device."""
    with monkeypatch.context() as patch:
        patch.setattr(NativeModel, "forward", raising(error))
        code, out, err = run_main(patch, capfd, "generate", "abc", *pair, *ON_CPU, "-q")
    first = (str(error).splitlines() or ["not enough memory"])[0].rstrip(".")
    assert (code, out.strip(), err) == (
        1,
        "",
        f"error: out of memory: {first}. Try a smaller model or --dtype bfloat16\n",
    )
    for backend, loader in (
        ("native", "specgen.engine.loaded_model.load_native"),
        ("transformers", "torch.nn.Module.to"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(loader, raising(error))
            code, out, err = run_main(
                patch, capfd, "generate", "abc", *pair[:2], *ON_CPU, "--backend", backend
            )
        hint = "Try --dtype bfloat16 or a smaller model"
        assert (code, out) == (1, "")
        assert (
            err.splitlines()[-1] == f"error: {pair[1]} does not fit into the memory of cpu. {hint}"
        )


def test_what_was_generated_before_is_shown_and_recorded(
    pair: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = (*pair, *ON_CPU, "-m", "sd", "-n", "30", "--ignore-eos", "the cat")
    whole = run_main(monkeypatch, capfd, "generate", *options, "-q")[1]
    propose = ModelDrafter.propose
    drafts = []

    def failing(*given: object) -> object:
        drafts.append(given)
        return propose(*given) if len(drafts) < 3 else raising(ERRORS[0])()  # type: ignore[arg-type, func-returns-value]

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    code, out, err = run_main(
        monkeypatch, capfd, "generate", *options, "--trace", str(tmp_path / "t.jsonl")
    )
    assert code == 1
    assert err.splitlines()[-1].startswith("error: out of memory: ")
    assert len(out) > 2
    assert whole.startswith(out.removesuffix("\n"))
    assert [line["type"] for line in parsed((tmp_path / "t.jsonl").read_text())] == [
        "start",
        "round",
        "round",
        "round",
    ]
