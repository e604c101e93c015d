"""`specgen compare`: transformers' methods, later turns, records, predictions, interruptions and mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import POSIX
from comparisons import Compare, parsed, runs_of
from families import LETTERS, make_model, make_tokenizer, near_copy, plain, save
from processes import Forked
from translated_pairs import permuted

from specgen import demo
from specgen.base.energy import Energy
from specgen.compare import runner


def test_the_baselines_give_transformers_output_and_count_its_passes(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    baselines = "transformers,transformers-assisted:k=3:schedule=constant:threshold=0"
    code, out, _ = compare(
        "-m", f"sd:k=3,{baselines}", "-n", "25", "--ignore-eos", "--repeats", "1", "--json", "--trace", str(trace)
    )
    assert code == 0
    _, sd, unassisted, assisted = parsed(out)
    assert unassisted["target_passes"] == unassisted["new_tokens"] == 100
    assert (unassisted["drafted"], unassisted["acceptance_rate"], unassisted["phase_seconds"]) == (0, None, None)
    assert assisted["identical"] == 4
    assert assisted["target_passes"] < 100
    assert assisted["accepted"] + assisted["target_passes"] == 100  # each pass gives one token of the target's own
    assert assisted["acceptance_rate"] == pytest.approx(
        sd["acceptance_rate"], abs=0.15
    )  # the same drafts, cut a little otherwise
    starts = [line for line in parsed(trace.read_text()) if line["type"] == "start"]
    own, baseline = starts[0], next(line for line in starts if line["method"] == "transformers-assisted")
    assert baseline["sampling"] == own["sampling"]
    assert baseline["settings"] == {"k": 3, "schedule": "constant", "threshold": 0.0}
    assert set(baseline) == set(own)


def test_a_draft_whose_other_vocabulary_is_as_large_is_refused_for_transformers_in_one_line(
    compare: Compare, tmp_path: Path
) -> None:
    models = ("-t", str(demo.folder("target")), "-d", str(permuted(tmp_path / "draft")))
    options = ("-m", "transformers-assisted,lookup", "-n", "4", "--repeats", "1", "--limit", "1", "--json")
    _, out, err = compare(*options, models=models)
    assert "two vocabularies of the same size (4,096) for one, and these differ" in parsed(out)[1]["error"]
    assert "`" not in err


def test_the_baselines_end_and_sample_as_our_methods_do(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    baselines = "transformers,transformers-assisted"
    code, out, _ = compare("-m", baselines, "-n", "60", "--repeats", "1", "--json")
    assert code == 0
    assert all(line["identical"] == 4 for line in parsed(out))
    options = ("--temperature", "1.3", "--top-k", "5", "--top-p", "0.9", "--seed", "1", "--ignore-eos", "--repeats", "1")
    code, _, err = compare("-m", baselines, "-n", "20", *options, "--trace", str(trace))
    assert (code, err) == (0, "")
    runs = runs_of(trace)
    assert all(len(runs[method][index][0]["token_ids"]) == 20 for method in baselines.split(",") for index in range(4))
    assert runs["transformers"][0][0]["token_ids"] != runs["ar"][0][0]["token_ids"]  # other draws


def test_the_baselines_use_the_models_penalties_but_not_its_sampling(compare: Compare, tmp_path: Path) -> None:
    model = make_model("llama")
    draft = near_copy(model)
    for config in (model.generation_config, draft.generation_config):
        config.update(do_sample=True, temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=1.7)
    models = ("-t", save(model, tmp_path / "target"), "-d", save(draft, tmp_path / "draft"))
    trace = tmp_path / "t.jsonl"
    baselines = "transformers,transformers-assisted"
    code, out, _ = compare("-m", baselines, "-n", "25", "--repeats", "1", "--json", "--trace", str(trace), models=models)
    assert code == 0
    assert all(line["identical"] == 4 for line in parsed(out))
    run = runs_of(trace)["ar"][0][0]
    assert run["token_ids"] == plain(model, run["start"]["prompt_ids"], 25, repetition_penalty=1.7)
    assert run["token_ids"] != plain(model, run["start"]["prompt_ids"], 25, repetition_penalty=1.0)


def test_energy_is_reported_with_and_without_idle_power(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Meter:
        """Each run takes half a second: 30 joules beyond 20 watts of idle power."""

        def start(self) -> None:
            pass

        def stop(self) -> Energy:
            return Energy("fake", 30.0, 20.0, 0.5, gross_joules=40.0)

        def close(self) -> None:
            pass

    monkeypatch.setattr(runner, "energy_meter_for", lambda devices: Meter())
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd", "-n", "10", "--ignore-eos", "--repeats", "1", "--limit", "2", "--energy")
    _, out, err = compare(*options, "--json", "--trace", str(trace))
    assert "Joules are those beyond the 20 W of the idle devices; 'with idle' adds these (fake)." in err
    for given in (out, compare(*options, "--json", "--resume", str(trace))[1]):
        for line in parsed(given):
            assert (line["joules_per_token"], line["gross_joules_per_token"]) == (3.0, 4.0)
    out = compare(*options)[1]
    assert re.search(r"joules +with .*\n.* a token +idle ", out)
    assert re.search(r"^sd .* 3 +4 ", out, flags=re.MULTILINE)
    old = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in old:
        line.pop("gross_joules_per_token", None)
    trace.write_text("".join(json.dumps(line) + "\n" for line in old))
    resumed = parsed(compare(*options, "--json", "--resume", str(trace))[1])
    assert [line["gross_joules_per_token"] for line in resumed] == [None, None], "an older trace has the one without idle power"


def test_later_turns_follow_plain_decodings_answers(compare: Compare, tmp_path: Path) -> None:
    path, trace = tmp_path / "question.jsonl", tmp_path / "t.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["hello there", "and now"]}))
    for extra, expected in (
        ((), "hello there{}\n\nand now"),
        (("--chat",), "user hello there\nassistant {}\nuser and now\nassistant "),
    ):
        options = ("--prompts", str(path), "--turns", "-m", "sd", "-n", "10", "--repeats", "1", *extra)
        code, out, _ = compare(*options, "--trace", str(trace), "--json")
        assert code == 0
        assert parsed(out)[1]["identical"] == 2
        starts = [line for line in parsed(trace.read_text()) if line["type"] == "start"]
        summaries = [line for line in parsed(trace.read_text()) if line["type"] == "summary"]
        answer = summaries[0]["text"] if extra else summaries[0]["text"].rstrip()
        ids = make_tokenizer(LETTERS)(expected.format(answer), add_special_tokens=False)["input_ids"]
        second = next(line["prompt_ids"] for line in starts if line["prompt_index"] == 1)
        assert second[-len(ids) :] == ids
        assert all(line["prompt_ids"] == second for line in starts if line["prompt_index"] == 1)
        assert compare(*options, "--resume", str(trace), "--json")[1] == out


def test_recorded_distributions_are_those_of_both_models(compare: Compare, pair: tuple[str, ...], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trace = tmp_path / "t.jsonl"
    options = ("-n", "12", "--repeats", "1", "--limit", "1", "--temperature", "0.7", "--top-k", "4", "--seed", "2")
    code, _, _ = compare("-m", "sd:k=3,lookup:k=10", *options, "--record", "distributions", "--trace", str(trace))
    assert code == 0
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (pair[1], pair[3])]
    runs = runs_of(trace)
    ids = list(runs["sd:k=3"][0][0]["start"]["prompt_ids"])
    seen = 0
    for line in runs["sd:k=3"][0][0]["rounds"]:
        drafted = line["draft_ids"]
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([ids + drafted])).logits[0].double() for model in models]
        for position in range(len(drafted)):
            p, q = (rows[len(ids) - 1 + position].softmax(dim=-1) for rows in logits)
            assert line["overlap"][position] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)
            assert line["kl"][position] == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-3)
            seen += 1
        ids += [*line["accepted_ids"], *([line["token_id"]] if line["token_id"] is not None else [])]
    assert seen > 5
    looked_up = [line for line in runs["lookup:k=10"][0][0]["rounds"] if line["draft_ids"]]
    assert all(line["overlap"] == line["kl"] == [None] * len(line["draft_ids"]) for line in looked_up)


def test_predictions_follow_from_the_passes_at_their_costs(compare: Compare, tmp_path: Path) -> None:
    """EESD's Eq. 13 and 14: each drafted token costs a draft pass, and each token that is not from the draft a target pass.

    By pass costs, each round costs its draft passes and one target pass over the draft and one token more.
    """
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,lookup:k=10,transformers", "-n", "25", "--ignore-eos", "--repeats", "1", "--predict")
    code, out, _ = compare(*options, "--json", "--trace", str(trace))
    assert code == 0
    plain_line, *drafting, baseline = parsed(out)
    assert plain_line["predicted"] == baseline["predicted"] == {"eq14": None, "pass_costs": None}
    runs = runs_of(trace)
    prefill = sum(by[0]["phase_seconds"]["prefill"] for by in runs["ar"].values())
    for line in drafting:
        costs = line["costs"]
        widths, seconds = map(list, zip(*((int(width), cost) for width, cost in costs["target"].items()), strict=True))
        # a draft of lookup takes the time that was measured for it, as no model runs
        phases = line["phase_seconds"]
        drafted = costs["draft"] if line["method"] == "sd:k=3" else (phases["draft"] + phases["policy"]) / line["drafted"]
        passes = line["new_tokens"] - line["accepted"]
        expected = line["new_tokens"] * seconds[0] / (line["drafted"] * drafted + passes * seconds[0])
        assert line["predicted"]["eq14"] == pytest.approx(expected)
        lengths = [len(round_["draft_ids"]) for by in runs[line["method"]].values() for round_ in by[0]["rounds"][1:]]
        taken = prefill + sum(length * drafted + np.interp(length + 1, widths, seconds) for length in lengths)
        plain_seconds = prefill + (line["new_tokens"] - len(runs["ar"])) * seconds[0]
        assert line["predicted"]["pass_costs"] == pytest.approx(plain_seconds / taken)
    table = compare(*options)[1]
    assert "by pass" in table
    assert "Eq. 14" in table


def test_settings_that_are_auto_are_measured_before_the_runs(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.pair.preparation.SEARCH_SECONDS", 0.0)
    code, out, _ = compare("-m", "selfsd", "-n", "12", "--limit", "1", "--repeats", "1", "--json")
    assert code == 0
    assert [line["error"] for line in parsed(out)] == [None] * 2


# ------------------------------------------------------------------ interrupted, light, wrong


@POSIX
def test_an_interrupted_comparison_prints_its_results_and_can_be_resumed(
    compare: Compare, pair: tuple[str, ...], prompts: str, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    arguments = ["-m", "sd:k=2,lookup", "-n", "24", "--ignore-eos", "--repeats", "40", "--prompts", prompts]
    process = Forked("compare", *pair, "--device", "cpu", *arguments, "--trace", str(trace))
    while not trace.exists() or trace.read_bytes().count(b'"summary"') < 8:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    table = out.decode()
    assert f"continue with --resume {trace}." in " ".join(table.split())
    assert re.search(r"^sd:k=2 +same ", table, flags=re.MULTILINE)
    assert all(run["finish_reason"] == "length" for by in runs_of(trace).values() for runs in by.values() for run in runs)
    kept = trace.read_bytes()
    code, _, err = compare(*arguments[:-4], "--repeats", "2", "--resume", str(trace))
    assert code == 0, err
    assert trace.read_bytes().startswith(kept)


def test_the_command_imports_nothing_heavy_before_it_runs() -> None:
    script = "import sys, specgen.cli.app, specgen.cli.compare, specgen.compare.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-m", "sivp"], ("'sivp'", "did you mean svip?")),
        (["--limit", "0"], ("--limit is 0",)),
        (["--repeats", "0"], ("--repeats is 0",)),
        (["-n", "0"], ("max_new_tokens is 0",)),
        (["--category", "proze"], ("'proze'", "did you mean prose?")),
        (["--record", "distributions"], ("--record distributions", "--trace")),
        (["--record", "all", "--trace", "t"], ("--record is 'all'",)),
        (["--csv", "/nowhere/f.csv"], ("CSV file", "/nowhere")),
        (["--resume", "/nowhere/t.jsonl"], ("/nowhere",)),
        (["--device", "tpu"], ("tpu", "cuda:N")),
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line(compare: Compare, arguments: list[str], named: tuple[str, ...]) -> None:
    code, out, err = compare(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert all(text in err for text in named), err
