"""`specgen compare`: figures that can be computed again from the trace, outputs that differ,
resuming, seeds, transformers' own methods, methods that cannot run, interruptions."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cli_helpers import POSIX, SUMMARY, run_main
from comparisons import PROMPTS, Compare, Lines, parsed, results_of, run, runs_of, usual
from families import LETTERS, make_model, make_tokenizer, near_copy, plain, save
from processes import Forked

from specgen import methods
from specgen.base.errors import RunError
from specgen.base.machine import ARITHMETIC
from specgen.base.types import Draft, Verdict
from specgen.compare import results, transformers_generate
from specgen.compare.results import as_fast_as, candidates, method_results
from specgen.compare.runner import read_comparison
from specgen.compare.verdict import Difference, count_outcomes, judge, outcome_text, tie_threshold
from specgen.decoding import verification
from specgen.decoding.verification import GreedyVerifier
from specgen.methods.sd import SpeculativeDecoding
from specgen.models.loaded_models import LoadedModels
from specgen.pair.pair import Pair
from specgen.view.trace_report import LOSSY

METHODS = "svip,sd:k=3,lookup:k=10,transformers,transformers-assisted"
FIGURES = set(SUMMARY.split()) - {"method", "text", "token_ids", "finish_reason"}
ONCE = ("--ignore-eos", "--repeats", "1")


def median_run(repeats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    seconds = median_low([run["seconds"] for run in repeats])
    return next(run for run in repeats if run["seconds"] == seconds)


def recomputed(own: Lines, plain_runs: Lines) -> dict[str, Any]:
    """A method's figures from the rounds of its runs, transformers' from its summaries. One run of
    each prompt for both."""
    rounds = [line for run in own for line in run["rounds"]]
    tokens = sum(len(run["token_ids"]) for run in own)
    counts = [
        (len(line["draft_ids"]), len(line["accepted_ids"]), bool(line["draft_ids"]), 1)
        for line in rounds
    ]
    counts = counts or [
        (run["drafted"], run["accepted"], run["drafts"], run["target_passes"]) for run in own
    ]
    seconds = sum(sum(line["seconds"].values()) for line in rounds) or sum(
        run["seconds"] for run in own
    )
    drafted, accepted, drafts, passes = map(sum, zip(*counts, strict=True))
    rejections = sum(line["source"] == "correction" for line in rounds)
    table = np.array(
        [
            [
                len(run["token_ids"]),
                run["seconds"],
                len(plain_run["token_ids"]),
                plain_run["seconds"],
            ]
            for run, plain_run in zip(own, plain_runs, strict=True)
        ]
    )
    drawn = table[np.random.default_rng(0).integers(0, len(table), (2000, len(table)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1] * drawn[:, 3] / drawn[:, 2], [0.025, 0.975])
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "target_passes": passes,
        "acceptance_rate": accepted / drafted if drafted else None,
        "draft_share": accepted / tokens if drafted else None,
        "harmonic_mean": 2 / (drafted / accepted + tokens / accepted) if accepted else None,
        "block_efficiency": tokens / passes,
        "mean_draft_length": drafted / drafts if drafts else None,
        "mean_accepted_run": accepted / rejections if rejections else None,
        "speedup": tokens / seconds / (table[:, 2].sum() / table[:, 3].sum()),
        "speedup_low": low,
        "speedup_high": high,
    }


def test_every_figure_recomputes_from_the_trace(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LEAST_PROMPTS", 2)  # intervals of few prompts
    monkeypatch.setattr(results, "LEAST_TOKENS", 0)
    trace = tmp_path / "t.jsonl"
    sheet = tmp_path / "f.csv"
    options = ("-m", METHODS, "-n", "18", "--repeats", "3", "--ignore-eos", "--by-category")
    code, out, err = compare(*options, "--json", "--trace", str(trace), "--csv", str(sheet))
    assert (code, err) == (0, "")
    lines = parsed(out)
    runs = runs_of(trace)
    medians = {
        method: {index: median_run(repeats) for index, repeats in by.items()}
        for method, by in runs.items()
    }
    # in turn: every method of a turn before the next turn, plain decoding first
    order = [line["spec"] for line in parsed(trace.read_text()) if line["type"] == "start"]
    assert order == ["ar", *METHODS.split(",")] * 4 * 3
    rows = {
        (row["method"], row["category"]): row
        for row in csv.DictReader(io.StringIO(sheet.read_text()))
    }
    assert set(rows) == {
        (line["method"], category) for line in lines for category in ("", "prose", "code")
    }
    table = compare(*options, "--resume", str(trace))[1]
    for line in lines:
        assert set(line) >= FIGURES | {
            "speedup",
            "speedup_low",
            "speedup_high",
            "identical",
            "tied",
            "diverged",
            "by_category",
        }
        assert (line["type"], line["identical"], line["tied"], line["diverged"]) == (
            "method",
            4,
            0,
            0,
        )
        assert (line["perplexity"], line["joules_per_token"], line["error"]) == (None, None, None)
        for category, indices in {"": [0, 1, 2, 3], "prose": [0, 1], "code": [2, 3]}.items():
            reported = line["by_category"][category] if category else line
            expected = recomputed(
                *(
                    [dict(medians[method][index]) for index in indices]
                    for method in (line["method"], "ar")
                )
            )
            if line["method"] == "ar":
                expected |= {"speedup_low": None, "speedup_high": None}
            for name, value in expected.items():
                known = value if value is None else pytest.approx(value, rel=1e-9)
                assert reported[name] == known, (line["method"], category, name)
                assert rows[line["method"], category][name] == (
                    "" if value is None else str(reported[name])
                )
        beginnings = f"{line['method']} ", f"{line['method']}, float32 "
        cells = next(row for row in table.splitlines() if row.startswith(beginnings))
        assert {f"{line['tokens_per_second']:,.1f}", f"{line['speedup']:.2f}×"} <= set(
            cells.split()
        )


def test_only_what_all_methods_have_run_counts() -> None:
    fast = run(1.0, 90, 70)
    results = results_of({"ar": [run(2.0)] * 3, "svip": [fast], "lookup": [fast] * 2})
    assert [each.prompts for each in method_results(results)] == [1, 1, 1]


def test_only_lossless_methods_with_the_targets_output_are_candidates_for_the_fastest() -> None:
    results = usual()
    results.differences["transformers-assisted", 0, 0] = Difference(0, 0, 3, 4, 5, 9.0, 1e-3)
    made = method_results(results)
    assert [each.name for each in candidates(made)] == ["svip", "lookup"]
    made = method_results(
        results_of(
            {"ar": [run(2.0)] * 5, "sd": [run(1.0, 90, 70)] * 5, "svip": [run(1.5, 90, 70)] * 5}
        )
    )
    assert as_fast_as(made, made[1]) == []


# ------------------------------------------------------------------ resumed, and seeds


@pytest.mark.parametrize("cut", [0, 1, 20, 400])
def test_a_cut_trace_is_resumed_where_it_ended(compare: Compare, tmp_path: Path, cut: int) -> None:
    """Complete, without its last line feed, within its last line, and some runs before its end;
    always with the same seeds."""
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,beta-ts", "-n", "12", "--repeats", "2", "--limit", "2", "--json")
    first = compare(*options, "--trace", str(trace))[1]
    complete = trace.read_bytes()
    seeds = {
        run["start"]["sampling"]["seed"]
        for by in runs_of(trace).values()
        for runs in by.values()
        for run in runs
    }
    kept = complete[: len(complete) - cut if cut < 400 else len(complete) // 2]
    trace.write_bytes(kept)
    again = ("--resume" if cut != 20 else "--trace", str(trace))
    # methods are those of the trace
    code, out, err = compare(*options[2 if not cut else 0 :], *again)
    assert (code, err) == (0, "" if cut != 20 else f"continuing {trace}, which has 11 runs\n")
    assert trace.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    runs = runs_of(trace)
    assert list(runs) == ["ar", "sd:k=3", "beta-ts"]
    assert [len(each) for by in runs.values() for each in by.values()] == [2] * 6
    assert [line["identical"] for line in parsed(out)] == [2, 2, 2]
    if cut < 20:
        assert (out, trace.read_bytes()) == (first, complete[:-cut] if cut else complete)
    # all methods share the seed of a prompt and repeat; those of finished runs are kept
    own = [
        [run["start"]["sampling"]["seed"] for runs in by.values() for run in runs]
        for by in runs.values()
    ]
    assert own[0] == own[1] == own[2]
    assert len(set(own[0])) == 4
    if cut < 400:
        assert set(own[0]) == seeds


def test_a_trace_with_other_settings_is_refused(
    compare: Compare, tmp_path: Path, prompts: str
) -> None:
    trace = tmp_path / "t.jsonl"
    other = tmp_path / "other.jsonl"
    options = ("-m", "lookup", "--repeats", "1", "--limit", "2", "-n", "12")
    compare(*options, "--trace", str(trace))
    before = trace.read_text()
    other.write_text(
        Path(prompts).read_text().replace("hello", "hullo").replace("the cat", "a dog")
    )
    cases: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("-n", "13"), ("-n 12", "now it is 13")),
        (("--temperature", "1"), ("--temperature 0.0", "1.0")),
        (("--ignore-eos",), ("--ignore-eos False",)),
        (("--prompts", str(other)), ("prompt 0 had other tokens", "--prompts")),
        (("--trace", str(other)), ("--resume appends to its own file",)),
    ]
    mistakes: list[tuple[str, Any]] = [
        ("spec", None),
        ("drafted", -1),
        ("seconds", 1e-40),
        ("energy", {"joules": 3}),
    ]
    for name, value in mistakes:
        path = tmp_path / name
        lines = [
            line | {name: value} if name in line and line["type"] != "round" else line
            for line in parsed(before)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        cases.append((("--resume", str(path)), (f"{path}, ", name, "--trace")))
    older = tmp_path / "older arithmetic"
    older.write_text(before.replace('"arithmetic": "', '"arithmetic": "0.'))
    cases.append(
        (
            ("--resume", str(older)),
            (f"{older} was made with version 0.{ARITHMETIC} of arithmetic, and now",),
        )
    )
    for arguments, named in cases:
        code, out, err = compare(*options, "--resume", str(trace), *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert all(text in err for text in named), err
    assert trace.read_text() == before
    runs = before.count('"type": "summary"')
    said = compare(*options, "--trace", str(trace))[2]
    assert said == f"{trace} is written anew: the {runs} finished runs in it are replaced\n"
    assert (
        json.loads(trace.read_text().splitlines()[-1])["seconds"] != parsed(before)[-1]["seconds"]
    )
    before = trace.read_text()
    lost = f"the {runs} finished runs in it would be lost. Name another file, or delete this one"
    others = (
        ((*options[:-1], "11"), f"{trace} was made with -n 12, and now it is 11: {lost}"),
        (
            ("-m", "suffix", *options[2:]),
            f"the trace {trace} holds {runs} finished runs of another comparison, which would be "
            f"lost. Name another file, add to it (--resume {trace}), or delete it",
        ),
    )
    for arguments, problem in others:
        code, out, err = compare(*arguments, "--trace", str(trace))
        assert (code, out, err) == (2, "", f"error: {problem}\n")
    assert trace.read_text() == before
    *lines, last = parsed(before)
    trace.write_text(
        "".join(
            json.dumps(line) + "\n" for line in [*lines, last | {"finish_reason": "interrupted"}]
        )
    )
    assert len(read_comparison(trace).runs) == 3, "an interrupted run is made again"


def test_seeds_repeat_a_run(
    compare: Compare,
    pair: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They do not depend on what else is measured; `generate` repeats a run by the seed in the
    trace."""
    options = ["-n", "16", "--ignore-eos", "--temperature", "1", "--seed"]
    trace = tmp_path / "a.jsonl"
    again = tmp_path / "b.jsonl"
    assert compare("-m", "beta-ts", *options, "5", "--repeats", "2", "--trace", str(trace))[0] == 0
    compare("-m", "sd", *options, "5", "--repeats", "1", "--limit", "2", "--trace", str(again))
    runs, others = runs_of(trace)["beta-ts"], runs_of(again)["sd"]
    assert all(
        others[prompt][0]["start"]["sampling"] == runs[prompt][0]["start"]["sampling"]
        for prompt in others
    )
    run = runs[3][1]
    given = [
        PROMPTS[3],
        *pair,
        "--device",
        "cpu",
        "-m",
        "beta-ts",
        *options,
        str(run["start"]["sampling"]["seed"]),
        "--json",
    ]
    rounds = [
        line
        for line in parsed(run_main(monkeypatch, capfd, "generate", *given)[1])
        if line["type"] == "round"
    ]
    names = ("draft_ids", "stop_reason", "token_id")
    assert [[line[name] for name in names] for line in rounds] == [
        [line[name] for name in names] for line in run["rounds"]
    ]


# ------------------------------------------------------------------ outputs that differ


class Wrong(GreedyVerifier):
    """A greedy verifier that sometimes returns a token that the target did not choose."""

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        verdict = super().verify(draft, rows)
        if verdict.source != "correction" or len(verdict.path) != 1:
            return verdict
        return Verdict(verdict.path, int(rows.logits[1].argmin()), verdict.source)


class WildDrafts(SpeculativeDecoding):
    """A lossy method."""

    name = "wild"
    lossless = False


class Contrary(GreedyVerifier):
    """A greedy verifier that takes the second-best token where the two best are almost tied, as
    rounding may."""

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        verdict = super().verify(draft, rows)
        if not draft.tokens:
            return verdict
        values, tokens = rows.logits[0].float().topk(2)
        close = float(values[0] - values[1]) < float(values[0]) / 64
        return Verdict((), int(tokens[1]), "correction") if close else verdict


def test_a_broken_verifier_is_detected_with_its_position_and_gap(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, ...], tmp_path: Path
) -> None:
    """The gap comes from an uncached pass of the target."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(verification, "GreedyVerifier", Wrong)
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,lookup", "-n", "30", *ONCE)
    code, out, err = compare(*options, "--trace", str(trace), "--json")
    assert code == 3
    line = parsed(out)[1]
    runs = runs_of(trace)
    difference = line["differences"][0]
    prompt = difference["prompt_index"]
    position = difference["place"]
    ids = [runs[method][prompt][0]["token_ids"] for method in ("ar", "sd:k=3")]
    assert position == next(
        position for position in range(30) if ids[0][position] != ids[1][position]
    )
    assert (difference["reference_id"], difference["token_id"]) == (
        ids[0][position],
        ids[1][position],
    )
    assert difference["gap"] > difference["threshold"] == 1e-3
    assert (difference["tie"], line["identical"] + line["tied"] + line["diverged"]) == (False, 4)
    model = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    with torch.no_grad():
        given = runs["ar"][prompt][0]["start"]["prompt_ids"] + ids[0][:position]
        row = model(input_ids=torch.tensor([given])).logits[0, -1]
    gap = float(row[difference["reference_id"]] - row[difference["token_id"]])
    assert difference["gap"] == pytest.approx(gap, abs=1e-4)
    assert f"sd:k=3 differs from plain decoding at {position} of prompt {prompt}" in err
    code, table, err = compare(*options, "--resume", str(trace))
    assert code == 3
    assert re.search(r"^sd:k=3 +(differs at \d+|\d differ) ", table, flags=re.MULTILINE)
    assert "sd:k=3 is the fastest" not in table


def test_a_near_tie_in_bfloat16_is_a_tie_and_in_float32_an_error(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two tokens of this model score within a bfloat16 step of each other wherever one of them
    leads."""
    model = make_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[::2] * (1 + 2**-7)
    models = (
        "-t",
        save(model, tmp_path / "target"),
        "-d",
        save(near_copy(model), tmp_path / "draft"),
        "--dtype",
    )
    monkeypatch.setattr(verification, "GreedyVerifier", Contrary)
    options = ("-m", "sd:k=2", "-n", "12", *ONCE)
    code, out, _ = compare(
        *options, "--json", "--trace", str(tmp_path / "t.jsonl"), models=(*models, "bfloat16")
    )
    line = parsed(out)[1]
    difference = line["differences"][0]
    assert (code, line["tied"] >= 1, line["diverged"], difference["tie"]) == (0, True, 0, True)
    assert 0 < abs(difference["gap"]) < difference["threshold"]
    code, table, _ = compare(
        *options, "--resume", str(tmp_path / "t.jsonl"), models=(*models, "bfloat16")
    )
    assert re.search(r"^sd:k=2 +(tie at \d+|\d ties) ", table, flags=re.MULTILINE)
    assert f"logits are {abs(difference['gap']):.2g} apart" in table
    code, out, _ = compare(*options, "--json", models=(*models, "float32"))
    line = parsed(out)[1]
    assert (code, line["tied"]) == (3, 0)
    assert all(
        abs(found["gap"]) > found["threshold"] == 1e-3 and not found["tie"]
        for found in line["differences"]
    )


def test_sampled_and_lossy_outputs_are_not_compared(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lossy method is unknown to `compare`."""
    options = ("-m", "sd", "-n", "12", "--temperature", "1", "--repeats", "1", "--limit", "2")
    code, out, _ = compare(*options, "--csv", str(tmp_path / "f.csv"))
    assert code == 0
    assert re.search(r"^sd +sampled ", out, flags=re.MULTILINE)
    assert "outputs are not compared" in out
    row = next(
        row
        for row in csv.DictReader((tmp_path / "f.csv").read_text("utf-8").splitlines())
        if row["method"] == "sd"
    )
    assert (row["identical"], row["tied"], row["diverged"]) == ("", "", "")
    monkeypatch.setitem(methods._known, "wild", WildDrafts())
    monkeypatch.setattr(verification, "GreedyVerifier", Wrong)
    code, out, err = compare("-m", "wild", "-n", "30", *ONCE)
    assert (code, err) == (0, "")
    assert re.search(r"^wild +lossy ", out, flags=re.MULTILINE)
    assert LOSSY in " ".join(out.split())
    assert "wild is" not in out
    assert "perp-" in out, "perplexity is measured"


def test_verdicts_by_hand() -> None:
    def difference(prompt: int, gap: float | None) -> Difference:
        return Difference(prompt, 0, 10 + prompt, 4, 5, gap, 1e-3)

    found = judge(None, 4, 1, [9], [1, 2, 3], [1, 2])  # type: ignore[arg-type]  # no logits are needed
    assert found == Difference(4, 1, 2, 3, None, None, 1e-3)
    assert (found.is_broken, found.as_dict()["tie"]) == (True, False)
    assert "one answer ends there" in found.explanation("sd", "prompt 4")
    for differences, text, counts in (
        ([], "same", [9, 0, 0]),
        ([difference(3, 0.0), difference(3, 0.0)], "tie at 13", [8, 1, 0]),
        ([difference(3, 0.0), difference(4, 0.0)], "2 ties", [7, 2, 0]),
        ([difference(3, 0.0), difference(4, 2.0), difference(5, 0.0)], "differs at 14", [6, 2, 1]),
        ([difference(3, 2.0), difference(4, -2.0), difference(4, 0.0)], "2 differ", [7, 0, 2]),
    ):
        assert outcome_text(differences) == text
        assert list(count_outcomes(9, differences).values()) == counts
    assert tie_threshold("bfloat16", 32.0, has_experts=True) == 2.5
    assert tie_threshold("float32", 32.0, has_experts=True) == 1e-3
    assert [
        tie_threshold(*given)
        for given in (("float32", 50.0), ("bfloat16", 32.0), ("float16", 32.0))
    ] == [1e-3, 0.5, 0.125]
    assert [difference(0, gap).is_broken for gap in (-0.0009, -0.002, math.nan, 0.001)] == [
        False,
        True,
        True,
        True,
    ]


# ------------------------------------------------------------------ methods that cannot run


def test_a_method_that_cannot_run_says_why_and_the_others_run(
    compare: Compare, pair: tuple[str, ...]
) -> None:
    """A reason that several methods share is shown once."""
    options = (
        "-m",
        "svip,eesd,eesd-tree,transformers-assisted,lookup",
        "-n",
        "8",
        "--repeats",
        "1",
        "--limit",
        "2",
    )
    code, out, err = compare(*options, models=pair[:2])
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert (
        "svip, transformers-assisted not run: needs a draft model, and there is none. "
        "Name one with --draft "
    ) in shown + " "
    train = f"Train one with specgen tune --train --methods eesd -t {pair[1]} --corpus FILE"
    assert (
        "eesd, eesd-tree not run: needs an exit layer trained for the target, and there "
        f"is none. {train}"
    ) in shown
    assert re.search(r"^lookup +same ", out, flags=re.MULTILINE)
    code, out, err = compare(
        "-m", "eagle,svip,svip:threshold=0.3", "-n", "8", "--limit", "1", models=pair[:2]
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: no method can run: eagle needs a head")
    assert err.count("svip needs a draft model") == 1


def test_without_options_the_methods_that_can_be_fast_are_compared(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = compare("-n", "2", "--json", "--budget", "100", models=())
    assert (code, err) == (0, "")
    found = {line["method"]: line["prompts"] for line in parsed(out)}
    assert list(found)[:2] == ["ar", "adaptive"]
    assert len(found) == 7
    assert set(found) <= {"ar", *methods.USUAL}
    assert set(found.values()) == {4}
    code, out, err = compare("-n", "2", "-m", "sd", "--budget", "1e-9", models=())
    assert code == 0
    assert "1 of 4 prompts" in out
    assert "The time was up (--budget SECONDS)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RunError("the worker died", "Try again"), "the worker died. Try again"),
        (MemoryError(), "out of memory. Leave this method out, or take a smaller -n"),
    ],
)
def test_a_method_that_fails_while_running_gives_exit_code_1_and_the_others_run(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    forgotten: list[Pair] = []
    monkeypatch.setattr(LoadedModels, "forget", lambda models: forgotten.append(models))
    monkeypatch.setattr(
        "specgen.methods.lookup.PromptLookupDrafter.propose", Mock(side_effect=error)
    )
    code, out, err = compare("-m", "lookup,sd", "-n", "8", "--repeats", "1", "--limit", "2")
    assert len(forgotten) == 1 + 3 + 2 * 2, (
        "caches are emptied after loading and before each run, also those that warm up"
    )
    assert (code, err) == (1, f"error: lookup: {said}\n")
    assert re.search(rf"^lookup +not run: {said[:20]}", out, flags=re.MULTILINE)
    assert re.search(r"^sd +same ", out, flags=re.MULTILINE)


# ------------------------------------------------------------------ transformers' own methods


def test_the_baselines_give_transformers_output_and_count_its_passes(
    compare: Compare, tmp_path: Path
) -> None:
    """With the model's penalties, and without its sampling."""
    model = make_model("llama")
    draft = near_copy(model)
    trace = tmp_path / "t.jsonl"
    for config in (model.generation_config, draft.generation_config):
        config.update(do_sample=True, temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=1.7)
    models = ("-t", save(model, tmp_path / "target"), "-d", save(draft, tmp_path / "draft"))
    baselines = "transformers,transformers-assisted:k=3:schedule=constant:threshold=0"
    options = ("-m", f"sd:k=3,{baselines}", "-n", "12", *ONCE, "--json", "--trace", str(trace))
    code, out, _ = compare(*options, models=models)
    assert code == 0
    _, _, unassisted, assisted = parsed(out)
    assert unassisted["target_passes"] == unassisted["new_tokens"] == 48
    assert (unassisted["drafted"], unassisted["acceptance_rate"], unassisted["phase_seconds"]) == (
        0,
        None,
        None,
    )
    assert unassisted["identical"] == assisted["identical"] == 4
    assert assisted["target_passes"] < 48
    # each pass gives one token of the target's own
    assert assisted["accepted"] + assisted["target_passes"] == 48
    run = runs_of(trace)["ar"][0][0]
    assert run["token_ids"] == plain(
        model, run["start"]["prompt_ids"], 12, repetition_penalty=1.7, eos_token_id=-1
    )
    starts = [line for line in parsed(trace.read_text()) if line["type"] == "start"]
    own = starts[0]
    baseline = next(line for line in starts if line["method"] == "transformers-assisted")
    settings = {"k": 3, "schedule": "constant", "threshold": 0.0, "dtype": "float32"}
    assert baseline["settings"] == settings
    assert (baseline["sampling"], set(baseline), baseline["draft"]) == (
        own["sampling"],
        set(own),
        models[3],
    )


def test_a_target_stored_in_16_bits_has_baselines_in_both_dtypes(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama").bfloat16()
    draft = near_copy(model)
    models = ("-t", save(model, tmp_path / "target"), "-d", save(draft, tmp_path / "draft"))
    run_in: list[tuple[str, torch.dtype, torch.dtype | None]] = []
    tokenizers_of = transformers_generate._tokenizers

    def recorded(pair: Any, target: Any, assistant: Any) -> dict[str, Any]:
        run_in.append((pair.target.dtype_name, target.dtype, getattr(assistant, "dtype", None)))
        return tokenizers_of(pair, target, assistant)

    monkeypatch.setattr(transformers_generate, "_tokenizers", recorded)
    options = ("-m", "transformers,transformers-assisted:k=2", "-n", "4", *ONCE)
    code, out, _ = compare(*options, "--json", models=models)
    assert code == 0
    assert {line["method"]: line["settings"].get("dtype") for line in parsed(out)} == {
        "ar": None,
        "transformers": "float32",
        "transformers:dtype=bfloat16": "bfloat16",
        "transformers-assisted:k=2": "float32",
        "transformers-assisted:k=2:dtype=bfloat16": "bfloat16",
    }
    wide, narrow = torch.float32, torch.bfloat16
    assert set(run_in) == {
        ("float32", own, assistant) for own in (wide, narrow) for assistant in (own, None)
    }
    run_in.clear()
    out = compare(*options, "--dtype", "bfloat16", models=models)[1]
    names = {line.split("  ")[0] for line in out.splitlines()}
    assert {name for name in names if name.startswith("transformers")} == {
        "transformers, bfloat16",
        "transformers-assisted:k=2, bfloat16",
    }
    assert {target for _, target, _ in run_in} == {narrow}


def test_a_baseline_with_other_numbers_may_give_other_tokens(compare: Compare) -> None:
    """The target's weights are rounded, and transformers' are not."""
    options = ("-m", "transformers:dtype=float32", "-n", "32", "--repeats", "1", "--limit", "4")
    code, out, _ = compare(*options, "--dtype", "int8", "--json")
    assert code == 0
    assert parsed(out)[1]["diverged"] > 0
    _, out, _ = compare(*options, "--dtype", "int8")
    words = " ".join(out.split())
    assert "transformers, float32: it computes otherwise than the target" in words
    assert "comes first" not in words


# ------------------------------------------------------- turns, records, predictions, interruptions


def test_later_turns_follow_plain_decodings_answers(compare: Compare, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(
        json.dumps({"question_id": 1, "category": "qa", "turns": ["hello there", "and now"]})
    )
    for extra, expected in (
        ((), "hello there{}\n\nand now"),
        (("--chat",), "user hello there\nassistant {}\nuser and now\nassistant "),
    ):
        options = (
            "--prompts",
            str(path),
            "--turns",
            "-m",
            "sd",
            "-n",
            "10",
            "--repeats",
            "1",
            *extra,
        )
        trace = tmp_path / f"{len(extra)}.jsonl"
        code, out, _ = compare(*options, "--trace", str(trace), "--json")
        assert (code, parsed(out)[1]["identical"]) == (0, 2)
        lines = parsed(trace.read_text())
        answer = next(line for line in lines if line["type"] == "summary")["text"]
        text = expected.format(answer if extra else answer.rstrip())
        ids = make_tokenizer(LETTERS)(text, add_special_tokens=False)["input_ids"]
        seconds = [
            line["prompt_ids"]
            for line in lines
            if line["type"] == "start" and line["prompt_index"] == 1
        ]
        assert seconds[0][-len(ids) :] == ids
        assert seconds == seconds[:1] * 2
        assert compare(*options, "--resume", str(trace), "--json")[1] == out


def test_predictions_follow_from_the_passes_at_their_costs(
    compare: Compare, tmp_path: Path
) -> None:
    """EESD's Eq. 13 and 14: each drafted token costs a draft pass, and each token that is not from
    the draft a target pass.

    By pass costs, each round costs its draft passes and one target pass over the draft and one
    token more.
    """
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,lookup:k=10,transformers", "-n", "16", *ONCE, "--predict")
    code, out, _ = compare(*options, "--json", "--trace", str(trace))
    assert code == 0
    plain_line, *drafting, baseline = parsed(out)
    assert plain_line["predicted"] == baseline["predicted"] == {"eq14": None, "pass_costs": None}
    runs = runs_of(trace)
    prefill = sum(by[0]["phase_seconds"]["prefill"] for by in runs["ar"].values())
    assert {line["method"] for line in drafting} == {"sd:k=3", "lookup:k=10"}
    for line in drafting:
        costs = line["costs"]
        widths, seconds = map(
            list, zip(*((int(width), cost) for width, cost in costs["target"].items()), strict=True)
        )
        # a draft of lookup takes the time that was measured for it, as no model runs
        phases = line["phase_seconds"]
        drafted = (
            costs["draft"]
            if line["method"] == "sd:k=3"
            else (phases["draft"] + phases["policy"]) / line["drafted"]
        )
        passes = line["new_tokens"] - line["accepted"]
        expected = (
            line["new_tokens"] * seconds[0] / (line["drafted"] * drafted + passes * seconds[0])
        )
        assert line["predicted"]["eq14"] == pytest.approx(expected)
        lengths = [
            len(round_["draft_ids"])
            for by in runs[line["method"]].values()
            for round_ in by[0]["rounds"][1:]
        ]
        taken = prefill + sum(
            length * drafted + np.interp(length + 1, widths, seconds) for length in lengths
        )
        plain_seconds = prefill + (line["new_tokens"] - len(runs["ar"])) * seconds[0]
        assert line["predicted"]["pass_costs"] == pytest.approx(plain_seconds / taken)


def test_answers_of_a_chat_end_with_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also transformers' own. The bundled model goes on and writes the user's next message."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Where is Oslo?"}')
    options = (
        "-m",
        "sd:k=5,transformers-assisted",
        "-n",
        "48",
        "--repeats",
        "1",
        "--json",
        "--prompts",
        str(tmp_path / "p.jsonl"),
    )
    for more, longest in ((("--chat",), 20), (("--chat", "--ignore-eos"), 48)):
        code, out, err = run_main(monkeypatch, capfd, "compare", *options, *more)
        assert code == 0, err
        assert [(line["identical"], line["new_tokens"] <= longest) for line in parsed(out)] == [
            (1, True)
        ] * 4
        assert all((line["new_tokens"] == 48) == (longest == 48) for line in parsed(out))


@POSIX
def test_an_interrupted_comparison_prints_its_results_and_can_be_resumed(
    compare: Compare, pair: tuple[str, ...], prompts: str, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    arguments = [
        "-m",
        "sd:k=2,lookup",
        "-n",
        "24",
        "--ignore-eos",
        "--repeats",
        "40",
        "--prompts",
        prompts,
    ]
    process = Forked("compare", *pair, "--device", "cpu", *arguments, "--trace", str(trace))
    while not trace.exists() or trace.read_bytes().count(b'"summary"') < 8:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    table = out.decode()
    assert "; the same command continues it." in " ".join(table.split())
    assert re.search(r"^sd:k=2 +same ", table, flags=re.MULTILINE)
    assert all(
        run["finish_reason"] == "length"
        for by in runs_of(trace).values()
        for runs in by.values()
        for run in runs
    )
    kept = trace.read_bytes()
    code, _, err = compare(*arguments[:-4], "--repeats", "2", "--resume", str(trace))
    assert code == 0, err
    assert trace.read_bytes().startswith(kept)
