"""`--dtype int8` for a target: every method's greedy output is that of its own plain decoding, and
its cost is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import parsed, run_main
from families import NATIVE, make_model, near_copy, prompt, save
from tuning_helpers import outcome

import specgen
from specgen.base.types import Context, SamplingParams
from specgen.engine.kernels.library import kernels
from specgen.pair import profile, profile_place
from specgen.tune.profile import from_outcome
from specgen.tune.rounding_cost import rounding_cost

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"k": 3, "width": 3}),
    ("lookahead", {}),
    ("selfsd", {"skip": "1"}),
]
OFTEN = (
    *(("llama", 1), ("gemma2", 1), ("qwen3", 2)),
    *(("qwen3_5_text", 1), ("lfm2", 2)),
    *(("glm4_moe", 1), ("gpt_oss", 2)),
)
RECURRENT = ("qwen3_5_text", "lfm2")


@pytest.mark.parametrize(
    ("family", "threads"),
    [
        pytest.param(family, threads, marks=() if (family, threads) in OFTEN else pytest.mark.slow)
        for family in (*NATIVE, *RECURRENT)
        for threads in (1, 2)
    ],
)
def test_every_method_gives_the_rounded_targets_own_tokens(
    tmp_path: Path, family: str, threads: int
) -> None:
    """In chains and in trees, whose rows see the keys in another order; close logits, so that one
    differing bit would show."""
    check_all_methods(tmp_path, family, threads)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", RECURRENT)
def test_without_kernels_recurrent_layers_give_the_rounded_targets_own_tokens(
    tmp_path: Path, family: str
) -> None:
    check_all_methods(tmp_path, family, 1)


def check_all_methods(tmp_path: Path, family: str, threads: int) -> None:
    if family in RECURRENT:  # with smaller weights or tied ones they would repeat one token
        target = make_model(family, initializer_range=0.12, tie_word_embeddings=False)
    else:
        target = make_model(family, initializer_range=0.05)
    folders = save(target, tmp_path / "target"), save(near_copy(target, 0.3), tmp_path / "draft")
    sampling = SamplingParams(max_new_tokens=48, ignore_eos=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with specgen.load(*folders, device="cpu", dtype="int8", draft_dtype="float32") as pair:
            assert pair.target.dtype_name == "int8"
            expected = pair.generate(prompt(7), "ar", sampling).token_ids
            assert len(set(expected)) > 3 or family not in RECURRENT
            for name, settings in METHODS:
                pair.forget()
                assert pair.generate(prompt(7), name, sampling, **settings).token_ids == expected, (
                    name,
                    settings,
                )
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_a_tokens_logits_are_the_same_in_a_chain_and_in_a_tree() -> None:
    """Torch computes; attention in float64 hides in which order the keys stand."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(10, 3000, (66,), generator=generator).tolist()
    context, drafted = Context(ids[:60]), ids[60:]
    with specgen.load(device="cpu", dtype="int8") as pair:
        runner = pair.target.runner()
        chain = runner.logits(context, drafted[1::2]).logits.clone()
        runner.clear_cache()
        # the chain's tokens with others between them
        tree = runner.logits(context, drafted, parents=[-1, -1, 0, 1, 1, 3]).logits
        assert torch.equal(tree[[0, 2, 4, 6]], chain)


def test_the_bundled_pairs_heads_and_exit_layer_draft_for_the_rounded_target() -> None:
    """Long outputs: with attention in float32, a draft tree changes a token of one output in
    three. Costs are given: by measured ones, a busy machine may draft nothing."""
    costs = {"draft_cost": 0.1, "verify_cost": 0.02}
    settings = {"eesd": costs, "adaptive": costs}
    sampling = SamplingParams(max_new_tokens=48, ignore_eos=True)
    with specgen.load(device="cpu", dtype="int8") as pair:
        assert pair.draft is not None
        assert pair.draft.dtype_name == "int8"
        for text in ("def mean(numbers):", "Once upon a time"):
            expected = pair.generate(text, "ar", sampling).token_ids
            for name in ("eagle", "medusa", "eesd", "eesd-tree", "glide", "adaptive"):
                found = pair.generate(text, name, sampling, **settings.get(name, {}))
                assert found.token_ids == expected, name
                assert found.summary["accepted"] > 0, name


def test_commands_say_that_the_target_is_rounded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("specgen.tune.rounding_cost.TOKENS", 96)
    _, out, _ = run_main(
        monkeypatch, capfd, "inspect", "--measure", "--device", "cpu", "--dtype", "int8", "--json"
    )
    report = parsed(out)[0]
    _, _, err = run_main(
        monkeypatch,
        capfd,
        "generate",
        "-m",
        "sd",
        "-n",
        "4",
        "abc",
        "--device",
        "cpu",
        "--dtype",
        "int8",
    )
    assert "sd (int8 target, int8 draft)" in err
    assert report["target"]["dtype"] == "int8"
    cost = report["rounding"]
    assert cost["tokens"] == 96
    assert 0 < abs(cost["rounded_perplexity"] / cost["stored_perplexity"] - 1) < 0.1
    assert 0 <= cost["changed"] < 0.2
    with specgen.load(device="cpu", dtype="int8") as pair:
        stored = rounding_cost(pair, lambda _: pytest.fail("it is measured already"))
        profile.save(
            from_outcome(outcome(), profile_place.profile_key_of(pair), rounding=stored), tmp_path
        )
    assert profile.load(tmp_path).measured.rounding == cost


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
def test_without_kernels_the_same_values_are_rounded(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those that are stored, without the factors of the norms before them."""
    target = make_model("llama", initializer_range=0.05)
    for layer in target.model.layers:
        layer.input_layernorm.weight.data.uniform_(0.1, 3)
        layer.post_attention_layernorm.weight.data.uniform_(0.1, 3)
    folder = save(target, tmp_path)

    def logits() -> torch.Tensor:
        with specgen.load(folder, device="cpu", dtype="int8") as pair:
            return pair.target.runner().logits(Context(prompt(7))).logits

    expected = logits()
    request.getfixturevalue("without_kernels")
    torch.testing.assert_close(logits(), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
