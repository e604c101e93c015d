"""Make a demo pair: `python -m specgen.demo tokenizer OUT`, then `... target OUT` and `... draft OUT`."""

from __future__ import annotations

import argparse
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
    parser = _Parser(prog="python -m specgen.demo", description="Train a demo pair on a corpus made on the spot.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{tokenizer,target,draft}")
    tokenizer = commands.add_parser("tokenizer", help="train the pair's tokenizer; comes first")
    tokenizer.add_argument("out", type=Path, help="the pair's folder; gets target/ and draft/")
    tokenizer.add_argument("--vocabulary-size", type=int, default=4096, help="default: 4096")
    for role in ROLES:
        command = commands.add_parser(role, help=f"train the {role}; goes on where an interrupted run stopped")
        command.add_argument("out", type=Path, help="the pair's folder, with the tokenizer in it")
        budget = command.add_mutually_exclusive_group()
        budget.add_argument("--minutes", type=float, help="training time (default: the bundled pair's, 85 and 15)")
        budget.add_argument("--steps", type=int, help="optimizer steps, for the same weights every time")
        command.add_argument("--batch-size", type=int, help="windows a step (default: 16)")
        command.add_argument("--window", type=int, help="tokens a window (default: 256)")
        command.add_argument("--hidden-size", type=int, help="default: 256 for the target, 128 for the draft")
        command.add_argument("--layers", type=int, help="default: 12 for the target, 2 for the draft")
        command.add_argument("--heads", type=int, help="default: one for every 64 of the hidden size")
        command.add_argument("--learning-rate", type=float, help="default: 0.002 for the target, 0.003 for the draft")
        command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
        command.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS", help="default: 500")
    return parser


def _train_tokenizer(options: argparse.Namespace) -> None:
    from specgen.demo.tokenizer import train_tokenizer

    train_tokenizer(options.out, options.vocabulary_size)


def _train_model(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from specgen.demo.train import BUNDLED, train

    if options.checkpoint_every < 1:
        raise SpecgenError(f"--checkpoint-every is {options.checkpoint_every}", "It has to be at least 1")
    recipe = BUNDLED[options.command]
    # A head count of the bundled shape would not fit another hidden size: 0 asks for a fresh one.
    shape = replace(recipe.shape, **{"heads": 0} | _given(options, "hidden_size", "layers", "heads"))
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
        if options.out.exists() and not options.out.is_dir():
            raise SpecgenError(f"{options.out} is not a folder")
        if options.command == "tokenizer":
            _train_tokenizer(options)
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
