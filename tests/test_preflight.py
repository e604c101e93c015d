"""`specgen inspect` of a pair: facts from its files, differences of tokenizers, pass times,
expected speedup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from families import CONTEXT, LETTERS, NATIVE, make_model, make_tokenizer, save
from runner_checks import LAYERED, RUN_BY, quick

import specgen
from specgen import demo, methods
from specgen.base.measuring import timed
from specgen.base.model_options import ModelOptions
from specgen.base.types import Context
from specgen.decoding.parallel_costs import LONGEST_WINDOW
from specgen.engine.kernels.library import kernels, kind, why_none
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.model_runner import ModelRunner, time_passes
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.tune import pair_inspection

Inspect = Callable[..., tuple[str, str]]
CPU = torch.device("cpu")


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Inspect:
    """Run `specgen inspect` in this process: what it wrote to stdout and stderr."""

    def call(*arguments: str, width: int = 100) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = run_main(monkeypatch, capfd, "inspect", "--device", "cpu", *arguments)
        assert code == 0, err
        return out, err

    return call


def json_report(inspect: Inspect, *arguments: str) -> dict[str, Any]:
    out, _ = inspect(*arguments, "--json")
    (line,) = out.splitlines()
    parsed: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return parsed


def test_the_bundled_pairs_figures_are_the_loaded_models(
    inspect: Inspect, demo_pair: specgen.Pair
) -> None:
    line = json_report(inspect, "--pair", "--dtype", "float32")
    assert line["type"] == "pair"
    assert demo_pair.draft is not None
    caches = 0
    for role, model in (("target", demo_pair.target), ("draft", demo_pair.draft)):
        parameters = sum(weight.numel() for weight in model.transformers_module.parameters())
        assert parameters == sum(model.files.parameters.values())
        assert line[role]["parameters"] == parameters
        matrices = sum(
            weight.numel() for weight in model.transformers_module.parameters() if weight.dim() == 2
        )
        size = 4 if kernels() is None else 2  # they stay as they are stored
        assert line[role]["weight_bytes"] == size * matrices + 4 * (parameters - matrices)
        assert line[role]["context_limit"] == model.context_limit
        runner = model.runner()
        runner.reserve(64)
        runner.logits(Context([1] * 64))
        held = bytes_per_token(runner)
        assert line[role]["cache_bytes"] == held
        caches += held * model.context_limit
    assert line["cache_bytes"] == caches
    assert line["tokenizers"]["refusal"] is None
    assert (
        line["tokenizers"]["shared"]
        == line["tokenizers"]["target_size"]
        == len(demo_pair.tokenizer.vocabulary())
    )
    assert line["tokenizers"]["differences"] == []
    assert line["measured"] is None
    assert set(line["methods"]) == set(methods.METHODS)
    for name, readiness in line["methods"].items():
        method = methods.METHODS[name]
        part = (
            demo.exit_folder()
            if method.needs_exit_layer
            else demo.head_folder(method.head)
            if method.head
            else None
        )
        assert readiness["ready"] == (part is None or part.is_dir())


def test_kernels_and_weights_are_named_and_what_torch_computes_is_measured(
    inspect: Inspect, request: pytest.FixtureRequest
) -> None:
    line = json_report(inspect, "--measure")
    target = line["target"]
    assert target["kernels"] == kind()
    assert target["no_kernels"] == why_none()
    assert target["cache_dtype"] == "float32"
    share = line["on_torch"]["target"]
    if kernels() is not None:
        assert target["kept_as"] == "as stored (bfloat16)"
        assert share["operators"] == []
        assert 0 < share["share"] < 1
        text = " ".join(inspect("--pair", "--dtype", "int8")[0].split())
        assert f"target: {kind()} draft: {kind()}" in text
        assert "target: rounded to 8 bits in groups of 32, 4.0 MiB; cache in float32, " in text
        request.getfixturevalue("without_kernels")
        line = json_report(inspect, "--pair")
        target = line["target"]
        with specgen.load(device="cpu") as pair:
            share = pair_inspection.measure_kernels(pair)["target"]._asdict()
            share["operators"] = list(share["operators"])
    assert (target["kernels"], target["kept_as"]) == ("torch", "float32")
    assert target["no_kernels"]
    assert share == {"operators": ["all operators"], "share": 1.0}


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
def test_calls_of_kernels_are_timed(demo_pair: specgen.Pair) -> None:
    own = kernels_for(CPU, torch.float32)
    assert own is not None
    before = vars(own).copy()
    runner = demo_pair.target.runner()
    runner.logits(Context([1] * 40))
    counts = []
    for token in (2, 3):
        with own.timed() as seconds:
            runner.logits(Context([token] * 40))  # not short: a short pass is one call
        counts.append(len(seconds))
        assert all(taken > 0 for taken in seconds)
    assert counts[0] == counts[1] > 1
    assert vars(own) == before


def bytes_per_token(runner: ModelRunner) -> int:
    """What the KV cache of a runner that has run holds per token."""
    cache: Any = runner.cache
    layers = (
        cache.buffers
        if isinstance(cache, KVBuffer)
        else [buffer for one in cache.layers for buffer in (one.keys, one.values)]
    )
    layers = [layer for layer in layers if layer is not None]  # some read the keys of others
    return sum(layer.numel() // layer.shape[-2] * layer.element_size() for layer in layers)


# that transformers computes something between a model's layers shows only when they are run
@pytest.mark.parametrize(
    ("family", "backend"),
    quick(pair for pair in RUN_BY if pair in LAYERED or pair[0] not in (*NATIVE, "cohere")),
)
def test_any_familys_files_are_understood(tmp_path: Path, family: str, backend: str) -> None:
    module = make_model(family)
    folder = save(module, tmp_path / family)
    options = ModelOptions(folder, backend=backend)
    report = pair_inspection.inspect_files(options, (CPU, CPU), lambda _: None)
    pair = specgen.load(folder, device="cpu", dtype="float32", backend=backend)
    saved = [buffer for name, buffer in module.named_buffers() if name in module.state_dict()]
    parameters = sum(weight.numel() for weight in (*module.parameters(), *saved))
    assert report.target.parameters == parameters
    assert report.target.context_limit == CONTEXT
    runner = pair.target.runner()
    runner.logits(Context([1] * 10))
    assert report.target.cache_bytes == bytes_per_token(runner)
    needing = {
        name
        for name, method in methods.METHODS.items()
        if method.needs_draft_model or method.needs_exit_layer or method.head
    }
    try:
        pair.target.model.check_layers("early exit")
        assert (
            report.methods["eesd"].cure
            == f"train one with specgen tune --train --methods eesd -t {folder} --corpus FILE"
        )
    except specgen.SpecgenError:
        needing.add("selfsd")
        for name in ("eesd", "selfsd", "medusa", "eagle", "glide"):
            assert (
                report.methods[name].why == f"needs a model built as Llama is, and {family} is not"
            )
    assert {name for name, readiness in report.methods.items() if not readiness.ready} == needing


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models whose tokenizers have the same tokens in another order, from the third on."""
    parent = tmp_path_factory.mktemp("strangers")
    model = make_model("llama")
    other = [*LETTERS[:3], *reversed(LETTERS[3:])]
    return save(model, parent / "one", make_tokenizer(LETTERS)), save(
        model, parent / "other", make_tokenizer(other)
    )


def test_a_pair_whose_tokens_cannot_be_translated_gets_a_report(
    inspect: Inspect, strangers: tuple[str, str]
) -> None:
    """Their vocabularies are of whole words, which keep no spaces. Drafts by way of their text are
    left."""
    out, err = inspect("-t", strangers[0], "-d", strangers[1])
    assert err == ""
    assert "✗ tokenizer  the tokenizers differ" in out
    alike = sum(
        one == other
        for one, other in zip(LETTERS, [*LETTERS[:3], *reversed(LETTERS[3:])], strict=True)
    )
    assert f"{alike} tokens have the same id in both" in " ".join(out.split())
    assert f"id 3: “a” in the target, “{LETTERS[-1]}” in the draft" in out
    assert re.search(r"✓ sd.*: ready; with translation=text", out)
    measured, _ = inspect("-t", strangers[0], "-d", strangers[1], "--measure", width=200)
    assert "--methods sd:translation=text,lookup,suffix" in " ".join(measured.split())
    line = json_report(inspect, "-t", strangers[0], "-d", strangers[1])
    assert line["tokenizers"]["overlap"] is None
    assert [entry["token_id"] for entry in line["tokenizers"]["differences"]] == [3, 4, 5, 6, 7]


def test_texts_that_are_split_differently_are_shown(inspect: Inspect, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None
    from tokenizers import normalizers

    lower = make_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    both = (
        "-t",
        save(make_model("llama"), tmp_path / "t", tokenizer),
        "-d",
        save(make_model("llama"), tmp_path / "d", lower),
    )
    out, _ = inspect(*both)
    assert "✓ tokenizer  the same" in out
    assert "but they split “Where is Oslo? It's in Norway" in out


def test_measured_figures_follow_from_the_pass_times(
    inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(timed.__kwdefaults__, "most", 3)
    line = json_report(inspect, "--measure", "--dtype", "float32")
    found = line["measured"]
    seconds = {int(width): taken for width, taken in found["target_seconds"].items()}
    draft = found["draft_seconds"]
    assert sorted(seconds) == list(range(1, 17))
    assert min(draft, *seconds.values()) > 0
    assert 1 <= found["pearl_window"] <= min(LONGEST_WINDOW, max(1, round(found["cost_ratio"])))
    for k in range(1, 16):
        verifying = max(0.0, seconds[k + 1] - seconds[1])
        rate = (k * draft + verifying) / (k * seconds[1])
        expected = rate if rate < 1 else None
        assert found["pays_from"][str(k)] == (None if expected is None else pytest.approx(expected))
    for entry in found["expected"]:
        chance = entry["acceptance"]
        k = entry["draft_length"]
        tokens = (1 - chance ** (k + 1)) / (1 - chance)
        assert entry["speedup"] == pytest.approx(tokens * seconds[1] / (k * draft + seconds[k + 1]))


def test_passes_are_timed_as_wide_as_they_say(demo_pair: specgen.Pair) -> None:
    runner = demo_pair.target.runner()
    seen = []
    forward = runner._forward
    runner._forward = lambda one, keep: (
        seen.append((one.last - one.first, one.first)),
        forward(one, keep),
    )[1]
    seconds = time_passes(runner, [1, 4], 20)
    assert set(seconds) == {1, 4}
    assert seen[0] == (20, 0)
    assert set(seen[1:]) == {(1, 19), (4, 19)}
    assert len(seen[1:]) >= 10


def test_two_devices_each_need_room_for_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 12 << 20, "mps": 900 << 10}
    monkeypatch.setattr(pair_inspection, "free_memory", lambda device: free[device.type])
    for draft, own in (("cpu", None), ("mps", 900 << 10)):
        devices = CPU, torch.device(draft)
        options = ModelOptions(dtype="float32")
        report = pair_inspection.inspect_files(options, devices, lambda _: None)
        assert (report.free_bytes, report.draft_free_bytes) == (12 << 20, own)
