r"""How the parts of the bundled target are made: trains exit layer and heads by `specgen tune
--train` on the bundled text, and compares them with the bundled ones.

    python tests/recipe/train_parts.py train OUT [KIND ...]     # 56 minutes on two quiet CPU cores
    python tests/recipe/train_parts.py compare OUT [KIND ...]   # 1 minute

`compare` measures both on the same held-out text with the same code: the share of drafted tokens
that are the target's, by position in a draft. A new part takes the place of the bundled one where
no share falls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen import demo
from specgen.base.types import Context, SamplingParams
from specgen.engine.loaded_model import LoadedModel, load_model
from specgen.engine.model_files import ModelSource, find_model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.trained_part import open_part
from specgen.engine.precision import Precision
from specgen.train.corpus import Use, demo_corpus
from specgen.train.loop import held_out_agreement
from specgen.train.texts import Text, continuations

CORPUS_TOKENS = 400_000
TEXTS = 32  # greedy ones, and as many sampled ones
PROMPT = 32  # tokens
LENGTH = 160  # of a text
EXIT = "eesd"


class Recipe(NamedTuple):
    """Hyperparameters of a part. `module` makes its runners, `depths` are the drafted tokens that
    are compared."""

    module: str
    minutes: float
    learning_rate: float
    batch: int
    window: int
    depths: int

    def command(self, kind: str, out: Path) -> list[str]:
        options = {
            "--methods": kind,
            "--corpus": "demo",
            "--minutes": self.minutes,
            "--learning-rate": self.learning_rate,
            "--batch-size": self.batch,
            "--window": self.window,
            "--device": "cpu",
            "--dtype": "float32",
            "--out": out,
        }
        named = [str(each) for option in options.items() for each in option]
        return [sys.executable, "-m", "specgen", "tune", "--train", *named]


# half of the minutes that the bundled parts took
RECIPES = {
    EXIT: Recipe("own_layers", 21, 0.003, 16, 256, 5),
    "medusa": Recipe("medusa", 4.2, 0.006, 8, 256, 4),
    "eagle": Recipe("eagle", 13.5, 0.008, 4, 128, 5),
    "glide": Recipe("glide", 6.5, 0.005, 4, 128, 8),
    "block": Recipe("block", 11, 0.01, 4, 128, 8),
}


def bundled(kind: str) -> Path:
    return demo.exit_folder() if kind == EXIT else demo.head_folder(kind)


def opened_target() -> LoadedModel:
    files = find_model(ModelSource(str(demo.folder("target"))), lambda _: None)
    return load_model(files, Precision(torch.float32), [torch.device("cpu")], lambda _: None)


def held_out_texts(target: LoadedModel) -> list[Text]:
    """Texts that the target generates after the beginnings of held-out documents."""
    corpus = demo_corpus(target.tokenizer.encode, 0, CORPUS_TOKENS)
    rng = Random(0)
    texts = []
    for greedy in (True, False):
        prompts = [corpus.sample(rng, PROMPT, uses=(Use.HELD_OUT,)) for _ in range(TEXTS)]
        sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
        made = continuations(target, prompts, LENGTH, sampling=sampling, seed=1)
        texts += [
            Text(ids, len(prompt), greedy, Use.HELD_OUT)
            for ids, prompt in zip(made, prompts, strict=True)
        ]
    return texts


def agreement(target: LoadedModel, kind: str, path: Path, texts: list[Text]) -> dict[str, Any]:
    """Returns the shares of drafted tokens that are the target's, by position in a draft, of greedy
    and of sampled texts (`held_out_agreement`)."""
    recipe = RECIPES[kind]
    weights: Any = open_part(path, target, is_exit=kind == EXIT).load()
    make_runners = import_module(f"specgen.engine.parts.{recipe.module}").make_runners
    runner = ModelRunner(target.model)
    draft = make_runners(weights, target.model, runner, lambda: None).draft
    judge = ModelRunner(target.model)

    def ranks_of(text: Text) -> Tensor:
        """0 for the target's token, 1 for another, -1 after the text's end."""
        ids = text.ids
        right = judge.logits(Context(ids[:1]), ids[1:]).logits.argmax(-1).tolist()
        table = torch.full((len(ids), recipe.depths), -1)
        for end in range(text.prompt_length, len(ids)):
            drafted = ids[end : end + recipe.depths - 1]
            rows = draft.logits(Context(ids[:end]), drafted).logits.argmax(-1).tolist()
            for depth, token in enumerate(rows):
                table[end - 1, depth] = int(token != right[end - 1 + depth])
        return table

    return held_out_agreement(texts, ranks_of)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "compare"])
    parser.add_argument("out", type=Path, help="folder of the new parts, each in a subfolder")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(RECIPES))
    options = parser.parse_args()
    kinds = options.kinds or list(RECIPES)
    if options.what == "train":
        for kind in kinds:
            subprocess.run(RECIPES[kind].command(kind, options.out / kind), check=True)
        return
    target = opened_target()
    texts = held_out_texts(target)
    for kind in kinds:
        for name, path in (("bundled", bundled(kind)), ("new", options.out / kind)):
            if not path.exists():
                continue
            for how, shares in agreement(target, kind, path, texts).items():
                shown = " ".join(f"{share:6.1%}" for share in shares or ())
                print(f"{kind:7}{name:8}{how:8}{shown}", flush=True)


if __name__ == "__main__":
    main()
