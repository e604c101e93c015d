"""Draft models with weights rounded to int8 or int4: the output stays the target's, and commands
say what was drafted with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cli_helpers import parsed, run_main
from families import NATIVE, make_model, near_copy, plain, prompt, save
from worker_helpers import posix

import specgen
from specgen.base.types import QUANTISED, SamplingParams
from specgen.engine import precision
from specgen.engine.kernels.library import kernels
from specgen.engine.native.linear import KernelLinear
from specgen.engine.precision import choose_draft_precision
from specgen.pair.pair import Pair

CPU = torch.device("cpu")
OFTEN = (("llama", "int8"), ("gemma2", "int4"), ("phi3", "int8"), ("qwen3_moe", "int4"))


@pytest.fixture(scope="module")
def rounded_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    parent = tmp_path_factory.mktemp("quantised")
    opened = []

    def made(family: str, kind: str) -> Pair:
        target = make_model(family)
        folders = [
            save(model, parent / family / role)
            for role, model in (("target", target), ("draft", near_copy(target)))
        ]
        opened.append(specgen.load(*folders, device="cpu", dtype="float32", draft_dtype=kind))
        return opened[-1]

    yield made
    for pair in opened:
        pair.close()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) in OFTEN else pytest.mark.slow)
        for family in NATIVE
        for kind in QUANTISED
    ],
)
def test_greedy_output_is_the_targets(
    rounded_pair: Callable[..., Pair], family: str, kind: str
) -> None:
    pair = rounded_pair(family, kind)
    assert pair.draft is not None
    assert pair.draft.dtype_name == kind
    if kernels() is not None:
        layers = pair.draft.model.layers  # type: ignore[attr-defined]
        assert all(isinstance(layer.mixer.qkv, KernelLinear) for layer in layers)
    ids = prompt(6)
    accepted = 0
    for method, settings in (("sd", {"k": 4}), ("sd", {"k": 3, "width": 2, "depth": 3})):
        result = pair.generate(ids, method, SamplingParams(max_new_tokens=24), **settings)
        assert result.token_ids == plain(make_model(family), ids, 24)
        accepted += result.summary["accepted"]
    assert accepted > 0


@posix
def test_pearls_process_runs_the_rounded_draft(rounded_pair: Callable[..., Pair]) -> None:
    """Its entropies are those of the rounded draft in this process, and not those of the draft as
    it is stored."""
    pair = rounded_pair("llama", "int8")
    ids = prompt(4)
    sampling = SamplingParams(max_new_tokens=12)
    assert pair.draft is not None
    with specgen.load(
        str(pair.target.folder), str(pair.draft.folder), device="cpu", dtype="float32"
    ) as stored:
        entropies = []
        for each, method, settings in (
            (pair, "pearl", {"window": 3}),
            (pair, "sd", {"k": 3}),
            (stored, "sd", {"k": 3}),
        ):
            found = each.generate(ids, method, sampling, record=True, **settings)
            assert found.token_ids == plain(make_model("llama"), ids, 12)
            entropies.append(
                next(round_.draft.entropies[0] for round_ in found.rounds if round_.draft.tokens)
            )
    assert entropies[0] == pytest.approx(entropies[1], abs=1e-5)
    assert abs(entropies[0] - entropies[2]) > 1e-4


def test_the_bundled_draft_loses_little_acceptance(demo_pair: Pair) -> None:
    sampling = SamplingParams(max_new_tokens=48)
    with specgen.load(device="cpu", dtype="float32", draft_dtype="int8") as pair:
        stored, rounded = (
            each.generate("def fibonacci(n):", "sd", sampling, k=5).summary["acceptance_rate"]
            for each in (demo_pair, pair)
        )
        assert rounded > 0.8 * stored
        assert pair.draft is not None
        assert choose_draft_precision("bfloat16", "float32", pair.draft.files, CPU).rounding is None


def test_without_working_products_the_draft_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "refusal", lambda *_: "int8 products give wrong results")
    with specgen.load(device="cpu", draft_dtype="int8") as pair:
        assert pair.draft is not None
        assert pair.draft.dtype_name == "float32"
        assert pair.draft.warning == "demo/draft is not quantised: int8 products give wrong results"


def test_the_commands_show_the_drafts_dtype(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*pair, "--device", "cpu", "--draft-dtype", "int8"]
    _, out, err = run_main(
        monkeypatch, capfd, "generate", "-m", "sd", "-n", "4", "abc", *options, "--json"
    )
    assert "sd (int8 draft)" in err
    assert (parsed(out)[0]["dtype"], parsed(out)[0]["draft_dtype"]) == ("float32", "int8")
    _, out, _ = run_main(monkeypatch, capfd, "inspect", *options, "--json")
    target, draft = (parsed(out)[0][role] for role in ("target", "draft"))
    assert (target["dtype"], draft["dtype"], draft["dtype_reason"]) == (
        "float32",
        "int8",
        "chosen by --draft-dtype",
    )
    assert draft["weight_bytes"] < 0.5 * target["weight_bytes"]
