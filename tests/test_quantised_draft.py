"""Draft models with weights rounded to int8 or int4: what their products compute, and that the output stays the target's."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import parsed, run_main
from families import NATIVE, make_model, near_copy, plain, prompt, save
from runner_checks import uncached
from scripted_models import PROMPT, scripted_run
from statistics_checks import LENGTH, SIGNIFICANCE, TOKENS, first_tokens, output_distribution, p_value
from worker_helpers import posix

import specgen
from specgen.base.types import QUANTISED, SamplingParams
from specgen.decoding import logits_ops
from specgen.engine.dtype_choice import choose_draft_dtype
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import quantised_products
from specgen.engine.native.loading import return_free_memory
from specgen.engine.native.products import (
    GROUP,
    DenseProduct,
    ProductFactory,
    QuantisedProduct,
    quantised_bytes,
    quantised_product,
    refusal,
    rounded_groups,
    rounded_rows,
    with_int4_weights,
    with_int8_weights,
    with_rounded_activations,
)
from specgen.pair.pair import Pair

CPU = torch.device("cpu")
PREPARATIONS = {"int8": (with_rounded_activations, with_int8_weights), "int4": (with_int4_weights,)}
needs = {
    kind: pytest.mark.skipif(refusal(kind, CPU) is not None, reason=f"this torch or this processor has no {kind} products")
    for kind in QUANTISED
}
KINDS = [pytest.param(kind, marks=needs[kind]) for kind in QUANTISED]
int8 = needs["int8"]


def restored(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight after rounding, in float64."""
    if kind == "int8":
        numbers, scales = rounded_rows(weight)
        return numbers.double() * scales[:, None].double()
    numbers, scales = rounded_groups(weight)
    return numbers.double() * scales.double().repeat_interleave(GROUP, 1)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_rounded_weight_is_off_by_half_a_scale_at_most(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(24, 96, generator=generator) * 10.0 ** torch.arange(-12, 12)[:, None]
    weight[3] = 0.0
    off = (restored(kind, weight) - weight.double()).abs().view(24, -1, GROUP)
    largest = weight.abs().view(24, -1, GROUP).amax(2) if kind == "int4" else weight.abs().amax(1, keepdim=True).expand(24, 3)
    half = largest.double()[..., None] / (127 if kind == "int8" else 7) / 2
    assert (off <= half * (1 + 1e-5)).all()
    assert off.max() > 0


@pytest.mark.parametrize(("kind", "prepare"), [(kind, each) for kind, all_ in PREPARATIONS.items() for each in all_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_weight(kind: str, prepare: Any, dtype: torch.dtype) -> None:
    """But for the rounding of activations: 8 bits of each row's range, or bfloat16."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        product = QuantisedProduct(kind, prepare, weight, bias, 0.25)
        product(torch.ones(1, 64, dtype=dtype))
    except quantised_products.OPERATOR_ERRORS:
        pytest.skip("this torch or this processor cannot")
    exact = restored(kind, weight)
    for rows in (1, 2, 5, 40):
        x = torch.randn(rows, 64, generator=generator).to(dtype)
        x[0] *= 1000  # a row with large numbers takes no bits from the others
        expected = x.double() @ exact.T
        alone = torch.cat([product(row[None]) for row in x])
        assert torch.equal(product(x), alone) or prepare is with_int8_weights or kind == "int4"  # no row depends on the others
        limit = 0.02 * expected.abs().amax(1, keepdim=True) + 0.02
        assert ((product(x).double() - expected - bias.double()).abs() < limit).all()
        residual = torch.randn(rows, 96, generator=generator).to(dtype)
        total, before = residual.double() + 0.25 * (expected + bias.double()), residual.clone()
        assert ((product.add_to(residual, x).double() - total).abs() < limit).all()
        assert torch.equal(residual, before)
        product.add_into(residual, x)
        assert ((residual.double() - total).abs() < limit).all()
    assert product(torch.zeros(3, 64, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_the_bytes_of_their_kind(kind: str) -> None:
    """Measured: the process's memory before and after 24 million numbers, 96 MB in float32, have been rounded."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not say how much memory a process has")
    sample = torch.randn(1024, 1024)
    quantised_product(kind, sample)
    gc.collect()

    def resident() -> int:
        return int(statm.read_text().split()[1]) * 4096

    return_free_memory()
    before = resident()
    kept = [quantised_product(kind, sample)[0] for _ in range(24)]
    gc.collect()
    return_free_memory()
    taken = resident() - before
    assert all(product is not None for product in kept)
    expected = 24 * quantised_bytes(kind, 1 << 20, 1024)
    assert 0.8 * expected < taken < 1.35 * expected


@int8
def test_a_broken_operator_is_not_used_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_products, "with_rounded_activations", lambda weight, **_: lambda x: x @ weight.T * 1.05)
    quantised_products._working.cache_clear()
    try:
        product, reason = quantised_product("int8", torch.randn(64, 64))
        assert (product is not None, reason) == (True, None)  # the next scheme
        for name in ("with_int8_weights", "with_int4_weights"):

            def fails(_: torch.Tensor) -> None:
                raise RuntimeError("no such operator\nand a stack")

            monkeypatch.setattr(quantised_products, name, fails)
        quantised_products._working.cache_clear()
        assert quantised_product("int8", torch.randn(64, 64)) == (None, "int8 products failed: no such operator")
        make = ProductFactory(CPU, torch.float32, pack=False, quantise="int4")
        assert isinstance(make(torch.randn(64, 64)), DenseProduct)
        assert (make.choices[0].quantised, make.choices[0].reason) == (None, "int4 products failed: no such operator")
        with specgen.load(device="cpu", draft_dtype="int8") as pair:
            assert pair.draft is not None
            assert pair.draft.dtype_name == "float32"
            assert pair.draft.warning == "demo/draft is not quantised: int8 products failed: no such operator"
    finally:
        monkeypatch.undo()
        quantised_products._working.cache_clear()


@int8
def test_sums_that_overflow_16_bits_are_noticed() -> None:
    """As on processors that add pairs of products in 16 bits: then the product with 7 bits is taken."""

    def saturating(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (x @ weight.T).clamp(-130.0, 130.0)

    assert not quantised_products._is_right("int8", saturating, CPU)


def test_a_weight_that_has_no_groups_is_rounded_to_int8() -> None:
    if refusal("int4", CPU) or refusal("int8", CPU):
        pytest.skip("this torch or this processor has no such products")
    make = ProductFactory(CPU, torch.float32, quantise="int4")
    for columns in (64, 48):
        make(torch.randn(64, columns))
    assert [choice.quantised for choice in make.choices] == ["int4", "int8"]
    assert make.choices[1].reason == "int4 products failed: rows of 48 numbers are no groups of 32"
    assert make.min_rows == 1


@pytest.fixture(scope="module")
def rounded_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    parent, opened = tmp_path_factory.mktemp("quantised"), []

    def made(family: str, kind: str) -> Pair:
        target = make_model(family)
        folders = [save(model, parent / family / role) for role, model in (("target", target), ("draft", near_copy(target)))]
        opened.append(specgen.load(*folders, device="cpu", dtype="float32", draft_dtype=kind))
        return opened[-1]

    yield made
    for pair in opened:
        pair.close()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family, kind, marks=[needs[kind], *([pytest.mark.slow] if family not in ("llama", "gemma2", "phi3") else [])]
        )
        for family in NATIVE
        for kind in QUANTISED
    ],
)
def test_greedy_output_is_the_targets(rounded_pair: Callable[..., Pair], family: str, kind: str) -> None:
    pair = rounded_pair(family, kind)
    assert pair.draft is not None
    assert pair.draft.dtype_name == kind
    assert {choice.quantised for choice in pair.draft.model.product_choices} <= {"int8", kind}  # type: ignore[union-attr]
    ids, accepted = prompt(4), 0
    expected = plain(make_model(family), ids, 24)
    for method, settings in (("sd", {"k": 4}), ("sd", {"k": 3, "width": 2, "depth": 3}), ("specinfer", {})):
        result = pair.generate(ids, method, SamplingParams(max_new_tokens=24), **settings)
        assert result.token_ids == expected
        accepted += result.summary["accepted"]
    assert accepted > 0


@posix
@int8
def test_pearls_process_runs_the_rounded_draft(rounded_pair: Callable[..., Pair]) -> None:
    """Its draft probabilities are those of the rounded draft in this process, and not those of the draft as it is stored."""
    pair = rounded_pair("llama", "int8")
    assert pair.draft is not None
    ids, sampling = prompt(4), SamplingParams(max_new_tokens=12)
    found = pair.generate(ids, "pearl", sampling, window=3, record=True)
    assert found.token_ids == plain(make_model("llama"), ids, 12)
    drafted = next(round_.draft for round_ in found.rounds if round_.draft.tokens)
    with specgen.load(str(pair.target.folder), str(pair.draft.folder), device="cpu", dtype="float32") as stored:
        entropies = []
        for each in (pair, stored):
            rounds = each.generate(ids, "sd", sampling, k=3, record=True).rounds
            entropies.append(next(round_.draft.entropies[0] for round_ in rounds if round_.draft.tokens))
    assert drafted.entropies[0] == pytest.approx(entropies[0], abs=1e-5)
    assert abs(drafted.entropies[0] - entropies[1]) > 1e-4


@int8
def test_samples_have_the_targets_distribution(tmp_path: Path) -> None:
    """q is the rounded draft's own distribution; a vocabulary of twelve tokens."""
    shape = {"vocab_size": 12, "num_hidden_layers": 1, "initializer_range": 0.4}
    target = make_model("llama", **shape)
    folders = [save(target, tmp_path / "target"), save(make_model("llama", seed=5, **shape), tmp_path / "draft")]
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.0, top_k=8, top_p=0.95)

    def next_probs(tokens: tuple[int, ...]) -> list[float]:
        probs: list[float] = logits_ops.warp(uncached(target, [*PROMPT, *tokens]), sampling).tolist()
        return probs

    with specgen.load(*folders, device="cpu", dtype="float32", draft_dtype="int8") as pair:
        runners = ModelRunner(pair.target.model), pair.draft.runner()  # type: ignore[union-attr]
        counts = Counter(first_tokens(scripted_run("sd", {"k": 3}, *runners, sampling, seed=seed)) for seed in range(300))
    assert p_value(counts, output_distribution(next_probs, TOKENS)) > SIGNIFICANCE


@int8
def test_the_bundled_draft_loses_little_acceptance(demo_pair: Pair) -> None:
    sampling, rates = SamplingParams(max_new_tokens=48), []
    with specgen.load(device="cpu", dtype="float32", draft_dtype="int8") as pair:
        for each in (demo_pair, pair):
            result = each.generate("def fibonacci(n):", "sd", sampling, k=5)
            rates.append(result.summary["acceptance_rate"])
    assert rates[1] > 0.8 * rates[0]


@int8
def test_the_commands_show_the_drafts_dtype(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*pair, "--device", "cpu", "--draft-dtype", "int8"]
    _, out, err = run_main(monkeypatch, capfd, "generate", "-m", "sd", "-n", "4", "abc", *options)
    assert "sd (int8 draft)" in err
    _, out, _ = run_main(monkeypatch, capfd, "generate", "-m", "sd", "-n", "4", "abc", *options, "--json", "-q")
    assert (parsed(out)[0]["dtype"], parsed(out)[0]["draft_dtype"]) == ("float32", "int8")
    _, out, _ = run_main(monkeypatch, capfd, "inspect", *options, "--json")
    (line,) = parsed(out)
    assert (line["target"]["dtype"], line["draft"]["dtype"], line["draft"]["dtype_reason"]) == (
        "float32",
        "int8",
        "chosen by --draft-dtype",
    )
    assert line["draft"]["weight_bytes"] < 0.5 * line["target"]["weight_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "abc", "--draft-dtype", "int3"], "there is no draft dtype 'int3'"),
        (
            ["generate", "abc", "-t", "TARGET", "--draft-dtype", "int8", "-m", "lookup"],
            "--draft-dtype int8 is given without --draft",
        ),
        (
            ["generate", "abc", "--backend", "transformers", "--draft-dtype", "int8"],
            "--draft-dtype int8 needs the native backend",
        ),
        (["generate", "abc", "--dtype", "int8"], "there is no dtype 'int8'"),
        (["tune", "--train", "-m", "sd", "--draft-dtype", "int8"], "--draft-dtype cannot be combined with --train"),
    ],
)
def test_mistakes_get_one_line(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    arguments = [pair[1] if argument == "TARGET" else argument for argument in arguments]
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


@int8
def test_costs_of_a_rounded_draft_are_not_those_of_the_stored_one() -> None:
    from specgen.pair.preparation import conditions

    with specgen.load(device="cpu", dtype="float32", draft_dtype="int8") as rounded, specgen.load(device="cpu") as stored:
        assert rounded.draft is not None
        assert stored.draft is not None
        assert conditions(rounded.draft)["dtypes"] == ["int8"]
        assert conditions(rounded.draft) != conditions(stored.draft)
        assert rounded.draft is not None
        chosen = choose_draft_dtype("bfloat16", "float32", rounded.draft.prepared, CPU)
        assert (chosen.name, chosen.quantise) == ("bfloat16", None)
