"""Makes commands for typer from groups of options, and checks the paths that a user names."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specgen.base.errors import SpecgenError
from specgen.base.files import check_writable, file_identity
from specgen.base.model_options import ModelOptions
from specgen.base.text import argument_text
from specgen.base.types import DRAFT_DTYPES
from specgen.cli.options import ARGUMENTS, COMMANDS, LEAST, ROWS, SHOWN

# of the files that specgen writes; the files of a model have others
OWN_SUFFIXES = (".jsonl", ".csv", ".html", ".svg")
_NAMES = {
    "--trace": "trace",
    "--resume": "trace",
    "--csv": "CSV file",
    "--svg": "picture",
    "--html": "page",
    "--out": "profile",
}
_TEXTS = ("prompt", "system", "stop", "json_schema", "regex")  # for the model, in UTF-8
_NO_NAME = {"": "it is empty", "-": "it is -, which is no file (/dev/stdout is standard output)"}


def command(name: str, *, shows_all: bool = True) -> Callable[..., None]:
    """Returns the command `name` as a function for typer. Each field of the command's groups in
    `COMMANDS` is an option; those that are not in `SHOWN` are hidden, unless `shows_all`.

    When it is called, the function imports `specgen.cli.NAME`, which takes long, and calls NAME in
    it with one object per group.
    """
    _, own_rows, groups = COMMANDS[name]
    parameters = []
    shown = SHOWN[name].split()
    for group in groups:
        types = get_type_hints(group)
        for field in options_of(group):
            is_hidden = not shows_all and field.name not in shown
            row = own_rows.get(field.name) or ROWS[field.name]
            parameters.append(
                _parameter(field, types[field.name], row, group.panel, is_hidden=is_hidden)
            )
    help_all = typer.Option(
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
            annotation=Annotated[bool, help_all],
        )
    )

    def run(**values: Any) -> None:
        from specgen.methods import outside

        outside.search_current_folder()
        options = []
        for group in groups:
            own = {field.name: values[field.name] for field in options_of(group)}
            options.append(group(**own))
        function = getattr(import_module(f"specgen.cli.{name}"), name)
        function(*options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _show_help(context: typer.Context, requested: bool) -> None:
    if requested:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def _completed(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the last method, or its last setting, of a list such as `svip,sd:k`."""
    from specgen import methods

    before, comma, last = incomplete.rpartition(",")
    name, colon, rest = last.partition(":")
    if not colon:
        return [f"{before}{comma}{method}" for method in methods.METHODS if method.startswith(last)]
    settings, colon, start = rest.rpartition(":")
    return [
        f"{before}{comma}{name}:{settings}{colon}{setting}="
        for setting in _settings_of(name)
        if setting.startswith(start)
    ]


def _completed_setting(context: typer.Context, incomplete: str) -> list[str]:
    settings = _settings_of(context.params.get("method") or "")
    return [f"{setting}=" for setting in settings if setting.startswith(incomplete)]


def _values(name: str, metavar: str) -> tuple[str, ...]:
    """Returns the values that can be completed: those that the option's help lists, such as
    `auto|native|transformers`."""
    if name == "draft_dtype":
        return DRAFT_DTYPES
    if "|" not in metavar:
        return ()
    return tuple(value for value in metavar.split("|") if value != "cuda:N")


def _completion_of(values: Sequence[str]) -> Callable[[typer.Context, str], list[str]]:
    def completed(context: typer.Context, incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return completed


def _settings_of(name: str) -> list[str]:
    from specgen import methods

    method = methods.METHODS.get(name or methods.DEFAULT_METHOD)
    return [] if method is None else methods.settable_names(method)


def _parameter(
    field: Field[Any],
    field_type: Any,
    row: tuple[str, str],
    panel: str | None,
    *,
    is_hidden: bool,
) -> inspect.Parameter:
    """Returns a field of an option group as an option or argument for typer.

    `row` has its names with the value, and its help text; `panel` is its heading in the help. Empty
    text and `-` are refused where a path or a model is expected.
    """
    words = row[0].split()
    names = [word for word in words if word.startswith("-")]
    metavar: str | None = " ".join(word for word in words if word not in names)
    if not metavar and field_type is not bool:
        metavar = None  # typer's own, by the type
    if not any(name.startswith("--") for name in names):
        names.insert(0, option_of(field.name))

    options: dict[str, Any] = {"help": row[1], "metavar": metavar, "rich_help_panel": panel}
    if "Path" in str(field_type):
        options["parser"] = lambda text: Path(_name(text))
    elif metavar in ("MODEL", "REV"):
        options["parser"] = _name
    elif field.name in _TEXTS:
        options["parser"] = argument_text
    elif "int" in str(field_type):
        options["min"] = LEAST.get(field.name)

    values = _values(field.name, metavar or "")
    if field.name in ("method", "methods"):
        options["autocompletion"] = _completed
    elif field.name == "settings":
        options["autocompletion"] = _completed_setting
    elif values:
        options["autocompletion"] = _completion_of(values)

    if field.name in ARGUMENTS:
        described = typer.Argument(show_default=False, **options)
    else:
        described = typer.Option(*names, hidden=is_hidden, **options)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[field_type, described],
    )


def options_of(group: Any) -> list[Field[Any]]:
    """Returns the fields of a group that are options on the command line."""
    others = getattr(group, "not_options", ())
    return [field for field in fields(group) if field.name not in others]


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options_given(group: Any) -> list[str]:
    """Returns the options of a group whose values differ from their defaults, as on the command
    line, such as `--top-k`."""
    return [
        option_of(field.name)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    ]


def _name(text: str) -> str:
    """Returns the name of a file, a folder or a model. Refuses empty text, which would be the
    working folder, and `-`, by which users mean a standard stream."""
    if text in _NO_NAME:
        raise typer.BadParameter(_NO_NAME[text])
    return text


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Iterable[tuple[str, Path | None]],
    models: ModelOptions | None = None,
) -> None:
    """Raises SpecgenError if an output cannot be written, or if it is the same file as another
    output, an input or redirected standard input. All links are followed.

    `outputs` are paths by option (None: not given), `inputs` pairs of an option and its path, a
    file or a folder. The files of `models` are inputs too.
    """
    if not any(outputs.values()):
        return
    read = [("standard input", Path("/dev/stdin")), *inputs]
    if models is not None:
        read += _of_models(models)
    outputs_by_file: dict[Hashable, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        check_writable(path, _NAMES[option])
        identity = file_identity(path)
        output = f"{option} {path}"
        if identity is None:  # a device
            continue
        if identity in outputs_by_file:
            raise SpecgenError(
                f"{outputs_by_file[identity]} and {output} are the same file", "Name another file"
            )
        outputs_by_file[identity] = output
        for name, source in read:
            if source is not None and _is_read(path, source):
                raise SpecgenError(
                    f"{output} is a file that is read: {name} {source}", "Name another file"
                )


def _is_read(path: Path, source: Path) -> bool:
    """Whether `path` is the file `source`, or a file in (or linked from) the folder `source` that
    specgen has not written."""
    files = [source]
    if source.is_dir():
        files = [file for file in source.iterdir() if file.suffix not in OWN_SUFFIXES]
    return file_identity(path) in map(file_identity, files)


def _of_models(models: ModelOptions) -> Iterator[tuple[str, Path]]:
    """Yields the files and folders that the options name, each after its option; without a target,
    the bundled models' folders."""
    from specgen import demo

    if models.target is None:
        for folder in (*map(demo.folder, demo.ROLES), demo.exit_folder()):
            yield "the bundled model", folder
    for field in ("target", "draft", "head", "exit_layer", "profile"):
        path = getattr(models, field, None)
        if path is not None:
            yield option_of(field), Path(os.path.expanduser(path))


def holds_single_run(path: Path) -> bool:
    """Whether a trace holds a run of one prompt, which new runs may replace.

    Raises SpecgenError if it holds runs of several prompts, of `generate --prompts` or of
    `compare`: they took long.
    """
    if not path.is_file():  # what is read from a pipe is lost for its reader
        return False
    try:
        with path.open("rb") as file:
            start = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    if not isinstance(start, dict):
        return False
    if start.get("prompt_index") is not None:
        problem = f"the trace {path} holds the runs of several prompts, which would be lost"
        raise SpecgenError(problem, "Name another file, or delete this one")
    return True
