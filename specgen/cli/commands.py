"""Makes commands for typer from groups of options, and checks the paths that a user names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specgen.base.errors import SpecgenError
from specgen.base.files import check_writable, file_identity
from specgen.base.text import argument_text
from specgen.base.types import DRAFT_DTYPES
from specgen.cli.options import ARGUMENTS, COMMANDS, LEAST, ROWS, SHOWN, ModelOptions

# of the files that specgen writes; models have none
OWN_SUFFIXES = (".jsonl", ".csv", ".html", ".svg")
_NAMES = {
    "--trace": "trace",
    "--resume": "trace",
    "--csv": "CSV file",
    "--svg": "picture",
    "--html": "page",
    "--out": "profile",
}
_TEXTS = ("prompt", "system", "stop")  # for the model, in UTF-8
_NO_NAME = {"": "it is empty", "-": "it is -, which is no file (/dev/stdout is standard output)"}


def command(name: str, *, shows_all: bool = True) -> Callable[..., None]:
    """Returns the command `name` as a function for typer. Each field of the command's groups in
    `COMMANDS` is an option.

    When it is called, the function imports `specgen.cli.NAME`, which takes long, and calls NAME in
    it with one object per group.
    """
    _, own, groups = COMMANDS[name]
    parameters = []
    shown = SHOWN[name].split()
    for group in groups:
        hints = get_type_hints(group)
        for each in fields(group):
            is_hidden = not shows_all and each.name not in shown
            parameters.append(
                _parameter(
                    each,
                    hints[each.name],
                    own.get(each.name) or ROWS[each.name],
                    group.panel,
                    is_hidden,
                )
            )
    told = typer.Option(
        "--help-all",
        metavar="",
        help="Show all options, then exit.",
        is_eager=True,
        callback=_show_help,
    )
    parameters.append(
        inspect.Parameter(
            "help_all",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, told],
        )
    )

    def run(**values: Any) -> None:
        made = [
            group(**{each.name: values[each.name] for each in fields(group)}) for group in groups
        ]
        getattr(import_module(f"specgen.cli.{name}"), name)(*made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _show_help(context: typer.Context, requested: bool) -> None:
    if requested:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def _completed(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the last of a list of methods with settings, such as `svip,sd:k`; or a setting of
    the method in --method."""
    from specgen import methods

    before, comma, last = incomplete.rpartition(",")
    name, colon, rest = last.partition(":")
    if not colon:
        return [f"{before}{comma}{each}" for each in methods.METHODS if each.startswith(last)]
    settings, colon, start = rest.rpartition(":")
    known = _settings_of(name)
    return [
        f"{before}{comma}{name}:{settings}{colon}{each}="
        for each in known
        if each.startswith(start)
    ]


def _completed_setting(context: typer.Context, incomplete: str) -> list[str]:
    return [
        f"{each}="
        for each in _settings_of(context.params.get("method") or "")
        if each.startswith(incomplete)
    ]


def _values(name: str, metavar: str) -> tuple[str, ...]:
    """Returns the values that an option's help lists, such as `auto|native|transformers`; none if
    it lists none."""
    if name == "draft_dtype":
        return DRAFT_DTYPES
    return (
        tuple(value for value in metavar.split("|") if value != "cuda:N") if "|" in metavar else ()
    )


def _completion_of(values: Sequence[str]) -> Callable[[typer.Context, str], list[str]]:
    def completed(context: typer.Context, incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return completed


def _settings_of(name: str) -> list[str]:
    from specgen import methods

    method = methods.METHODS.get(name or methods.DEFAULT_METHOD)
    if method is None:
        return []
    return [
        *(["policy"] if method.any_policy else []),
        *methods.known_settings(method, method.policy),
    ]


def _parameter(
    field: Field[Any], kind: Any, row: tuple[str, str], panel: str | None, is_hidden: bool = False
) -> inspect.Parameter:
    """Returns a field of an option group as an option or argument for typer, which refuses empty
    and `-` as a path or a model.

    `kind` is the field's type, `row` its names with the value and its help text, `panel` the
    heading in the help.
    """
    words = row[0].split()
    names = [word for word in words if word.startswith("-")]
    metavar = " ".join(word for word in words if word not in names) or (
        "" if kind is bool else None
    )
    more: dict[str, Any] = {"help": row[1], "metavar": metavar, "rich_help_panel": panel}
    if "Path" in str(kind):
        more["parser"] = lambda text: Path(_name(text))
    elif metavar in ("MODEL", "REV"):
        more["parser"] = _name
    elif field.name in _TEXTS:
        more["parser"] = argument_text
    elif "int" in str(kind):
        more["min"] = LEAST.get(field.name)
    if not any(each.startswith("--") for each in names):
        names.insert(0, option_of(field.name))
    if field.name in ("method", "methods"):
        more["autocompletion"] = _completed
    elif field.name == "settings":
        more["autocompletion"] = _completed_setting
    elif values := _values(field.name, metavar or ""):
        more["autocompletion"] = _completion_of(values)
    is_argument = field.name in ARGUMENTS
    if not is_argument:
        more["hidden"] = is_hidden
    described = (
        typer.Argument(show_default=False, **more) if is_argument else typer.Option(*names, **more)
    )
    annotation = Annotated[kind, described]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
    )


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def given(group: Any) -> list[str]:
    """Returns the options of a group whose values differ from their defaults, as on the command
    line, such as `--top-k`."""
    return [
        option_of(each.name) for each in fields(group) if getattr(group, each.name) != each.default
    ]


def _name(text: str) -> str:
    """Refuses empty text and `-` as a file, a folder or a model: empty text would be the working
    folder, and `-` a file of that name, where users mean a standard stream."""
    if text in _NO_NAME:
        raise typer.BadParameter(_NO_NAME[text])
    return text


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Iterable[tuple[str, Path | None]],
    models: ModelOptions | None = None,
) -> None:
    """Raises SpecgenError if an output cannot be written, or is the same file as another output, an
    input or redirected standard input. All links are followed.

    `outputs` are paths by option (None: not given), `inputs` pairs of an option and its path, a
    file or a folder. The files of `models` are inputs too.
    """
    if not any(outputs.values()):
        return
    written: dict[Hashable, str] = {}
    read = [
        ("standard input", Path("/dev/stdin")),
        *inputs,
        *(_of_models(models) if models is not None else ()),
    ]
    for option, path in outputs.items():
        if path is None:
            continue
        check_writable(path, _NAMES[option])
        identity = file_identity(path)
        given = f"{option} {path}"
        if identity is None:  # a device
            continue
        if identity in written:
            raise SpecgenError(
                f"{written[identity]} and {given} are the same file", "Name another file"
            )
        written[identity] = given
        for name, other in read:
            if other is not None and _is_read(path, other):
                raise SpecgenError(
                    f"{given} is a file that is read: {name} {other}", "Name another file"
                )


def _is_read(path: Path, given: Path) -> bool:
    """Whether `path` is the file `given`, or one in the folder `given` (or linked from it) that
    specgen has not written."""
    read = (
        [other for other in given.iterdir() if other.suffix not in OWN_SUFFIXES]
        if given.is_dir()
        else [given]
    )
    return file_identity(path) in map(file_identity, read)


def _of_models(models: ModelOptions) -> Iterator[tuple[str, Path]]:
    """Yields the files and folders that model options name, each after its option; without a
    target, the bundled models' folders."""
    from specgen import demo

    if models.target is None:
        yield from (
            ("the bundled model", folder)
            for folder in (*map(demo.folder, demo.ROLES), demo.exit_folder())
        )
    for option in ("target", "draft", "head", "exit_layer", "profile"):
        if (path := getattr(models, option, None)) is not None:
            yield option_of(option), Path(os.path.expanduser(path))
