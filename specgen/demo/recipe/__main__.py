"""Commands that train and evaluate a demo pair: `python -m specgen.demo.recipe --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specgen.demo import ROLES
from specgen.errors import SpecgenError


class _Parser(argparse.ArgumentParser):
    """Errors on one line; argparse would put its usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m specgen.demo.recipe", description="Train a demo pair on a corpus made on the spot.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{tokenizer,target,draft,eval}")
    tokenizer = commands.add_parser("tokenizer", help="train the pair's tokenizer; comes first")
    tokenizer.add_argument("out", type=Path, help="the pair's folder; gets target/ and draft/")
    tokenizer.add_argument("--vocabulary-size", type=int, default=4096, help="default: 4096")
    for role in ROLES:
        command = commands.add_parser(role, help=f"train the {role}; goes on where an interrupted run stopped")
        command.add_argument("out", type=Path, help="the pair's folder, with the tokenizer in it")
        budget = command.add_mutually_exclusive_group()
        budget.add_argument("--minutes", type=float, help="training time (default: the bundled pair's, 90 and 5)")
        budget.add_argument("--steps", type=int, help="optimizer steps, for the same weights every time")
        command.add_argument("--batch-size", type=int, help="windows a step (default: 8)")
        command.add_argument("--window", type=int, help="tokens a window (default: 256)")
        command.add_argument("--hidden-size", type=int, help="default: 128 for the target, 48 for the draft")
        command.add_argument("--layers", type=int, help="default: 12 for the target, 2 for the draft")
        command.add_argument("--heads", type=int, help="default: one for every 32 of --hidden-size; 4 and 3 without it")
        command.add_argument("--learning-rate", type=float, help="default: 0.004 for the target, 0.008 for the draft")
        command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
        command.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS", help="default: 500")
    judge = commands.add_parser("eval", help="how often a pair is right, on fresh prompts, and how often draft and target agree")
    judge.add_argument("out", type=Path, nargs="?", help="the pair's folder (default: the bundled pair)")
    judge.add_argument("--draft", type=Path, metavar="FOLDER", help="another draft model, as specgen tune --train makes one")
    judge.add_argument("--prompts", type=int, default=200, help="how many; a fifth of them are heads of functions (default: 200)")
    judge.add_argument("--seed", type=int, default=0, help="for other prompts (default: 0)")
    judge.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def _evaluate(options: argparse.Namespace) -> None:
    if options.prompts < 4:
        raise SpecgenError(f"--prompts is {options.prompts}", "It has to be at least 4, one of each category")
    from rich.console import Console
    from rich.table import Table

    from specgen.demo import folder
    from specgen.demo.recipe.evaluate import as_json, as_rows, evaluate

    folders = {role: folder(role) if options.out is None else options.out / role for role in ROLES}
    if options.draft is not None:
        folders["draft"] = options.draft
    found = evaluate(folders, options.prompts, options.seed, lambda what: print(what, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(as_json(found)))
        return
    head, *rows = as_rows(found)
    table = Table(*head, box=None, title="target / draft", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _train_tokenizer(options: argparse.Namespace) -> None:
    from specgen.demo.recipe.tokenizer import train_tokenizer

    train_tokenizer(options.out, options.vocabulary_size)


def _train_model(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from specgen.demo.recipe.hyperparameters import BUNDLED
    from specgen.demo.recipe.train import train

    if options.checkpoint_every < 1:
        raise SpecgenError(f"--checkpoint-every is {options.checkpoint_every}", "It has to be at least 1")
    recipe = BUNDLED[options.command]
    sizes = _given(options, "hidden_size", "layers", "heads")
    if "hidden_size" in sizes:  # which the bundled shape's heads need not fit: 0 asks for fresh ones
        sizes = {"heads": 0} | sizes
    shape = replace(recipe.shape, **sizes)
    changes = _given(options, "minutes", "steps", "batch_size", "window", "learning_rate")
    if "steps" in changes:
        changes["minutes"] = None
    recipe = replace(recipe, shape=shape, **changes)
    train(options.command, recipe, options.out, device=options.device, checkpoint_every=options.checkpoint_every)


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that were given, by name."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 where it failed, 2 for bad input, 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    try:
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
        print("interrupted; the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
