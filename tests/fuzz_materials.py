"""What the fuzzer's cases start from: tiny models, traces that they recorded, a profile and an exit layer."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traces
import yaml
from families import CHAT_TEMPLATE, LETTERS, make_model, make_tokenizer, near_copy, random_predictor, save
from tuning_helpers import outcome

import specgen
from specgen.cli.app import main
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.parts.trained_part import ExitDescription, save_exit
from specgen.tune import profile as profiles


@dataclass(frozen=True)
class Materials:
    """Folders of models and files that are valid. `traces` are their texts, `families` targets of other architectures."""

    target: Path
    draft: Path
    other: Path
    families: dict[str, Path]
    traces: list[str]
    profile: Path
    exit_layer: Path

    @property
    def folders(self) -> list[Path]:
        return [self.target, self.draft, self.other, *self.families.values(), self.profile, self.exit_layer]

    @property
    def profile_values(self) -> dict[str, Any]:
        made: dict[str, Any] = yaml.safe_load((self.profile / "profile.yaml").read_text(encoding="utf-8"))
        made["written"] = str(made["written"])
        return made


def make(folder: Path) -> Materials:
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model("llama")
    target = Path(save(model, folder / "target", tokenizer))
    draft = Path(save(near_copy(model), folder / "draft", tokenizer))
    other = Path(save(make_model("llama", seed=7), folder / "other"))  # with another tokenizer
    families = {
        name: Path(save(make_model(name), folder / name, tokenizer))
        for name in ("qwen3", "gemma2", "gemma3_text", "gpt2", "phi3")
    }
    with specgen.load(str(target), str(draft), device="cpu", dtype="float32") as pair:
        profile = folder / "profile"
        profile.mkdir()
        profiles.save(profiles.from_outcome(outcome(), profiles.profile_key_of(pair)), profile)
        tensors = pair.target.model.last_layers(target, 1)
    described = ExitDescription("target", weights_fingerprint(target), 1, predictor=True)
    save_exit(folder / "exit", tensors, random_predictor(32), described)
    made = Materials(target, draft, other, families, [], profile, folder / "exit")
    made.traces.extend(_traces(folder, made))
    return made


def _traces(folder: Path, made: Materials) -> list[str]:
    """Traces of generations and comparisons, recorded or made by hand."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "category": "c"}\n{"prompt": "abc abc"}\n')
    models = ["-t", str(made.target), "-d", str(made.draft), "--device", "cpu", "-q", "-n", "6"]
    compare = ["compare", *models, "--prompts", str(prompts), "--repeats", "1"]
    commands = [
        ["generate", "hello abc", *models],
        ["generate", "hello abc", *models, "-m", "specinfer", "--temperature", "1", "--record", "distributions", "--perplexity"],
        [*compare, "-m", "sd,sd:width=2:depth=2,mtad,pearl,transformers"],
        [*compare, "-m", "beta-ts,lookup", "--perplexity", "--record", "distributions"],
    ]
    found = []
    for index, command in enumerate(commands):
        path = folder / f"recorded{index}.jsonl"
        before, sys.argv = sys.argv, ["specgen", *command, "--trace", str(path)]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
            try:
                main()
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(err.getvalue()) from ended
            finally:
                sys.argv = before
        found.append(path.read_text(encoding="utf-8"))
    compared = traces.a_run("pearl", spec="pearl", prompt_index=0, category="c", repeat=0)
    hand_made = (traces.a_run(), traces.a_recorded_run(8), compared)
    return [*found, *(traces.write(folder / "hand.jsonl", *lines).read_text(encoding="utf-8") for lines in hand_made)]
