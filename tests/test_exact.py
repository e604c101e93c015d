"""`--exact`: greedy speculative output equals plain decoding's token by token, in bfloat16 too, and comparisons expect that."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make_model, near_copy, save
from gpu_models import use_graphs
from runner_checks import every
from static_checks import random_model, random_tokens

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.compare.verdict import judge
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.families import FAMILIES

METHODS: dict[str, dict[str, Any]] = {"sd": {"k": 5}, "svip": {}, "lookup": {}, "selfsd": {"skip": "1"}}
SAMPLING = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)]
)  # grouped heads; both reach their windows or caps
@pytest.mark.parametrize("length", every(3, [7, 1, 40]))
def test_chains_give_plain_decodings_tokens(tmp_path: Path, length: int, family: str, dtype: str) -> None:
    target = make_model(family, initializer_range=0.05)  # close logits: rounding would show
    folders = save(target, tmp_path / "target"), save(near_copy(target, 0.3), tmp_path / "draft")
    with specgen.load(*folders, device="cpu", dtype=dtype, backend="native", exact=True) as pair:
        assert pair.target.exact
        prompt = [3 + 5 * at % 80 for at in range(length)]
        expected = pair.generate(prompt, "ar", SAMPLING).token_ids
        for name, settings in METHODS.items():
            pair.forget()
            assert pair.generate(prompt, name, SAMPLING, **settings).token_ids == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_one_width_give_equal_bits_in_bfloat16(family: str) -> None:
    model, ids = random_model(family, torch.bfloat16), random_tokens(Random(6), 540)
    use_graphs(model, (16,))
    plain, verifying = ModelRunner(model), ModelRunner(model)
    for runner in (plain, verifying):
        runner.logits(Context(ids[:480]))  # the prompt runs eagerly
    one_by_one = [plain.logits(Context(ids[:length])).logits[-1].clone() for length in range(480, 541)]
    for length in (480, 485, 493, 508):
        found = verifying.logits(Context(ids[:length]), ids[length : length + 15]).logits
        assert torch.equal(found, torch.stack(one_by_one[length - 480 : length - 464])), length


def test_no_difference_between_exact_outputs_is_a_tie() -> None:
    target = SimpleNamespace(reference_logits=lambda *_: torch.tensor([1.0, 1.0, 0.0]), dtype_name="bfloat16")
    pair = SimpleNamespace(target=target)
    rounding = judge(pair, 0, 0, [1], [0], [1])  # type: ignore[arg-type]
    bug = judge(pair, 0, 0, [1], [0], [1], exact=True)  # type: ignore[arg-type]
    assert rounding is not None
    assert bug is not None
    assert (rounding.is_broken, bug.is_broken) == (False, True)
    assert judge(pair, 0, 0, [1], [0], [0], exact=True) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "covered"),
    [("sd:k=3", True), ("pearl", True), ("eesd", True), ("eesd-tree", False), ("specinfer", False), ("transformers", False)],
)
def test_exactness_covers_chains_of_specgens_own_methods(written: str, covered: bool) -> None:
    assert parse_spec(written).drafts_chains == covered


def test_exactness_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.pair.loading.pick_device", lambda _: torch.device("mps"))
    with pytest.raises(SpecgenError, match=r"--exact is for the CPU and for one CUDA device, and the target would run on mps"):
        specgen.load(exact=True)
    monkeypatch.undo()
    with pytest.raises(SpecgenError, match="--exact needs the native backend"):
        specgen.load(exact=True, device="cpu", backend="transformers")
