"""A device that runs out of memory: one line and exit code 1, wherever it happens; comparisons continue with other methods."""

from __future__ import annotations

import json
import re

import pytest
import torch
from cli_helpers import parsed, run_main
from comparisons import Compare

from specgen.base.errors import is_out_of_memory
from specgen.decoding.drafting import ModelDrafter
from specgen.engine.native.native_model import NativeModel

ERRORS = {  # as Python, torch's allocators and an accelerator's driver raise them
    "python": MemoryError(),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has 1 MiB free."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
}
any_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
python_or_torch = pytest.mark.parametrize("error", [ERRORS["python"], ERRORS["cpu"]], ids=["python", "cpu"])


def raising(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@any_error
@pytest.mark.parametrize(
    "command", [("generate", "-n", "9", "abc"), ("tune", "-m", "sd", "--budget", "6")], ids=["generate", "tune"]
)
def test_it_is_one_line_and_exit_code_1(
    pair: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    command: tuple[str, ...],
) -> None:
    assert is_out_of_memory(error)
    monkeypatch.setattr(NativeModel, "forward", raising(error))
    code, out, err = run_main(monkeypatch, capfd, *command, *pair, "--device", "cpu", "--dtype", "float32", "-q")
    assert (code, out.strip()) == (1, "")
    first = (str(error).splitlines() or ["not enough memory"])[0].rstrip(".")
    assert err == f"error: out of memory: {first}. Try a smaller model or --dtype bfloat16\n"


@any_error
def test_weights_that_do_not_fit_are_named_with_their_device(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    for backend, loader in (("native", "specgen.engine.model_loading.load_native"), ("transformers", "torch.nn.Module.to")):
        with monkeypatch.context() as patch:
            patch.setattr(loader, raising(error))
            options = ("--device", "cpu", "--dtype", "float32", "--backend", backend)
            code, out, err = run_main(patch, capfd, "generate", "abc", *pair[:2], *options)
        assert (code, out) == (1, "")
        hint = "Try --dtype bfloat16 or a smaller model"
        assert err.splitlines()[-1] == f"error: {pair[1]} does not fit into the memory of cpu. {hint}"


@python_or_torch
def test_what_was_generated_before_is_shown_and_recorded(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: object, error: Exception
) -> None:
    options = ("-m", "sd", "--device", "cpu", "--dtype", "float32", "-n", "30", "--ignore-eos", "the cat")
    whole = run_main(monkeypatch, capfd, "generate", *pair, *options, "-q")[1]
    propose, drafts = ModelDrafter.propose, []

    def failing(*given: object) -> object:
        drafts.append(given)
        return propose(*given) if len(drafts) < 3 else raising(error)()  # type: ignore[arg-type, operator]

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    trace = f"{tmp_path}/t.jsonl"
    code, out, err = run_main(monkeypatch, capfd, "generate", *pair, *options, "--trace", trace)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: out of memory: ")
    assert len(out) > 2
    assert whole.startswith(out.removesuffix("\n"))
    with open(trace, encoding="utf-8") as lines:
        assert [line["type"] for line in map(json.loads, lines)] == ["start", "round", "round", "round"]


@python_or_torch
def test_in_a_comparison_the_other_methods_are_measured(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("specgen.methods.lookup.PromptLookupDrafter.propose", raising(error))
    options = ("-m", "lookup,sd", "-n", "8", "--repeats", "1", "--limit", "1")
    code, out, err = compare(*options)
    assert (code, err) == (1, "error: lookup: out of memory. Leave this method out, or take a smaller -n\n")
    assert re.search(r"^lookup +not run: out of memory; leave this method out", out, flags=re.MULTILINE)
    assert re.search(r"^sd +same ", out, flags=re.MULTILINE)
    lines = {line["method"]: line for line in parsed(compare(*options, "--json")[1])}
    assert lines["lookup"]["error"] == "out of memory. Leave this method out, or take a smaller -n"
    assert lines["sd"]["error"] is None
