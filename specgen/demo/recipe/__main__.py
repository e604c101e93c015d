"""Commands that train and evaluate a demo pair: `python -m specgen.demo.recipe --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from specgen.base.errors import SpecgenError
from specgen.demo import ROLES, folder
from specgen.demo.recipe.hyperparameters import BUNDLED


class _Parser(argparse.ArgumentParser):
    """An argument parser that prints errors on one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m specgen.demo.recipe", description="Train and evaluate a demo pair on generated text.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{tokenizer,target,draft,eval,prompts}")
    tokenizer = commands.add_parser("tokenizer", help="train the pair's tokenizer (the first step)")
    tokenizer.add_argument("out", type=Path, help="folder of the pair; target/ and draft/ are created in it")
    tokenizer.add_argument("--vocabulary-size", type=int, default=4096, help="default: 4096")
    for role in ROLES:
        _add_training_options(commands.add_parser(role, help=f"train the {role}, or resume an interrupted run"), role)
    evaluation = commands.add_parser("eval", help="share of right answers on fresh prompts, and agreement of draft and target")
    evaluation.add_argument("out", type=Path, nargs="?", help="folder of the pair (default: the bundled pair)")
    evaluation.add_argument("--draft", type=Path, metavar="FOLDER", help="another draft model, e.g. from specgen tune --train")
    evaluation.add_argument("--prompts", type=int, default=200, help="number of prompts, one in five is code (default: 200)")
    evaluation.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default: 0)")
    evaluation.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    prompts = commands.add_parser("prompts", help="write fresh prompts to a file, for specgen tune --train --prompts")
    prompts.add_argument("out", type=Path, metavar="FILE.jsonl")
    prompts.add_argument("--prompts", type=int, default=2000, help="number of prompts (default: 2000)")
    prompts.add_argument("--seed", type=int, default=1, help="another seed gives other prompts (default: 1; eval has 0)")
    return parser


def _add_training_options(command: argparse.ArgumentParser, role: str) -> None:
    recipe = BUNDLED[role]
    shape = recipe.shape
    command.add_argument("out", type=Path, help="folder of the pair, which has to contain the tokenizer")
    budget = command.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help=f"training time (default: {recipe.minutes})")
    budget.add_argument("--steps", type=int, help="number of optimizer steps instead; reproducible on the same machine")
    command.add_argument("--batch-size", type=int, help=f"sequences per step (default: {recipe.batch_size})")
    command.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        dest="training_length",
        help=f"tokens per training sequence (default: {recipe.training_length})",
    )
    command.add_argument("--hidden-size", type=int, help=f"default: {shape.hidden_size}")
    command.add_argument("--layers", type=int, help=f"default: {shape.layers}")
    command.add_argument("--heads", type=int, help=f"default: {shape.heads}, or one per 32 of --hidden-size if that is given")
    command.add_argument("--learning-rate", type=float, help=f"peak learning rate (default: {recipe.learning_rate})")
    command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    command.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS", help="default: 500")


def _evaluate(options: argparse.Namespace) -> None:
    if options.prompts < 4:
        raise SpecgenError(f"--prompts is {options.prompts}", "It has to be at least 4, one per category")
    from rich.console import Console
    from rich.table import Table

    from specgen.demo.recipe.evaluate import as_json, evaluate, table_rows

    folders = {role: folder(role) if options.out is None else options.out / role for role in ROLES}
    if options.draft is not None:
        folders["draft"] = options.draft
    scores = evaluate(folders, options.prompts, options.seed, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(as_json(scores)))
        return
    header, *rows = table_rows(scores)
    table = Table(*header, box=None, title="target / draft", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _write_prompts(options: argparse.Namespace) -> None:
    from specgen.demo.recipe.fresh_prompts import fresh_prompts

    prompts = fresh_prompts(options.prompts, options.seed)
    Random(options.seed).shuffle(prompts)  # whoever reads only some of them gets all categories
    lines = [json.dumps({"prompt": one.prompt, "category": one.category}) for one in prompts]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _train_tokenizer(options: argparse.Namespace) -> None:
    from specgen.demo.recipe.tokenizer import train_tokenizer

    train_tokenizer(options.out, options.vocabulary_size)


def _train_model(options: argparse.Namespace) -> None:
    from specgen.demo.recipe.train import train

    if options.checkpoint_every < 1:
        raise SpecgenError(f"--checkpoint-every is {options.checkpoint_every}", "It has to be at least 1")
    recipe = BUNDLED[options.command]
    sizes = _given(options, "hidden_size", "layers", "heads")
    if "hidden_size" in sizes:
        sizes = {"heads": 0} | sizes  # the bundled number of heads may not fit this hidden size
    changes = _given(options, "minutes", "steps", "batch_size", "training_length", "learning_rate")
    if "steps" in changes:
        changes["minutes"] = None
    recipe = replace(recipe, shape=replace(recipe.shape, **sizes), **changes)
    train(options.command, recipe, options.out, device=options.device, checkpoint_every=options.checkpoint_every)


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the values of the named options, by name. Options that the user did not give on the command line are left out."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for invalid input, 130 for an interruption."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "prompts":
            _write_prompts(options)
            return 0
        if options.out is not None and options.out.exists() and not options.out.is_dir():
            raise SpecgenError(f"{options.out} is not a folder")
        if options.command == "tokenizer":
            _train_tokenizer(options)
        elif options.command == "eval":
            _evaluate(options)
        else:
            _train_model(options)
    except SpecgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command resumes training from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
