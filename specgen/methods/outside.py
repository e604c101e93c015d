"""Methods from outside of this package: classes that a user names as `package.module:Class`, and
those that installed packages offer as entry points of the group `specgen.methods`. Imports no
torch.

Loading one imports its module, which runs it. So a `package.module:Class` is loaded only where a
command or a call of the Python API names it, never because a profile, a trace or a request to the
server does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from specgen.base.errors import RunError, SpecgenError, nearest
from specgen.base.settings import Setting
from specgen.base.text import one_line
from specgen.base.types import SamplingParams
from specgen.methods.base import Method

GROUP = "specgen.methods"  # of entry points
HOW = "Name a class as package.module:Class; settings follow as NAME=VALUE"
# names that mean something else where settings are given as arguments
_TAKEN = {parameter.name for parameter in fields(SamplingParams)} | {
    "method",
    "policy",
    "prompt",
    "record",
    "sampling",
}

_further_places: list[str] = []  # where modules are looked for after `sys.path`


def is_class_name(text: str) -> bool:
    """Whether `text`, the first part after a colon, names a class rather than a setting."""
    return text.isidentifier()


def is_reference(name: str) -> bool:
    """Whether the name of a method is that of a class: `package.module:Class`."""
    return ":" in name


def is_local(name: str) -> bool:
    """Whether this reference is of a class made in a function, which no import finds."""
    return "<locals>" in name


def reference_of(method: type[Method]) -> str:
    return f"{method.__module__}:{method.__qualname__}"


def search_current_folder() -> None:
    """Lets modules of methods also be found in the current folder, after all other places, so that
    no file there replaces an installed module. Does nothing with Python's option -P.

    The folder is added to the path when the first such module is imported.
    """
    with suppress(OSError):  # the folder is gone
        if not sys.flags.safe_path:
            _further_places.append(os.getcwd())


@cache
def installed() -> dict[str, Sequence[EntryPoint]]:
    """Returns the entry points of the group, by name: more than one where packages disagree."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        others = found.setdefault(point.name, [])
        if point not in others:  # a package may be found in two places
            others.append(point)
    return dict(found)


def load(name: str) -> Method:
    """Returns an instance of the class `package.module:Class`, whose name is `name`. Raises
    SpecgenError if its module cannot be imported or if it is no complete method."""
    module_name, _, class_name = name.partition(":")
    module = _imported(module_name, name)
    if not hasattr(module, class_name):
        methods = [
            key
            for key, value in vars(module).items()
            if _is_method(value) and value.__module__ == module_name
        ]
        hint = f"It has {', '.join(methods)}" if methods else HOW
        raise SpecgenError(
            f"{_place(module)} has no {class_name!r}{nearest(class_name, methods)}", hint
        )
    return made(getattr(module, class_name), name)


def load_installed(name: str) -> Method:
    """Returns the method that an installed package offers under this name. Raises as `load`, and
    where several packages do."""
    points = installed()[name]
    targets = {point.value for point in points}
    if len(targets) > 1:
        packages = " and ".join(_package(point) for point in points)
        raise SpecgenError(
            f"{packages} both have a method {name!r}",
            f"Name one as {' or '.join(sorted(targets))}, or remove one of the packages",
        )
    point = points[0]
    try:
        method = load(point.value.replace(" ", ""))
    except SpecgenError as error:
        problem = f"the method {name!r} of {_package(point)}: {error.message}"
        raise SpecgenError(problem, error.hint) from error
    method.name = name
    return method


def clash(name: str) -> SpecgenError | None:
    """Returns the error to raise where an installed package offers a method under the name of one
    of ours; None if none does."""
    if name not in installed():
        return None
    point = installed()[name][0]
    return SpecgenError(
        f"{_package(point)} has a method {name!r}, as specgen has",
        f"Name it as {point.value}; to use specgen's, remove that package, or rename its method",
    )


def made(method: Any, name: str) -> Method:
    """Returns an instance of the class `method`, whose name is `name`. Raises SpecgenError if it is
    no complete method."""
    if not _is_method(method):
        kind = f"a class without that base ({method.__name__})"
        if not isinstance(method, type):
            kind = f"a {type(method).__name__}"
        problem = f"{name} is no subclass of specgen.methods.Method, but {kind}"
        raise SpecgenError(problem, "Derive it from Method, or from a base such as ChainMethod")
    if isabstract(method) or method.start is Method.start:
        raise SpecgenError(
            f"{name} is incomplete: it has no start(models, request)",
            "Write it, or derive the class from a base that has it, such as ChainMethod",
        )
    try:
        instance: Method = method()
    except Exception as error:  # whatever the user's code raises
        raise SpecgenError(
            f"{name}() fails with {_in_words(error)}",
            "Methods are made without arguments: settings come with the request",
        ) from error
    _check_settings(instance, name)
    instance.name = name
    instance.alias_of = ""
    return instance


def _imported(module_name: str, name: str) -> ModuleType:
    """Imports a module. What it prints goes to standard error. Raises SpecgenError if there is no
    such module, or if its import fails."""
    _check_module_name(module_name, name)
    sys.path += [folder for folder in dict.fromkeys(_further_places) if folder not in sys.path]
    try:
        with redirect_stdout(sys.stderr):
            return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise SpecgenError(
                f"there is no module {error.name!r} for the method {name}",
                f"{HOW}. Modules are looked for as Python does (PYTHONPATH), then in the "
                "current folder",
            ) from error
        raise _failed(module_name, error) from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise _failed(module_name, error) from error


def _check_module_name(module_name: str, name: str) -> None:
    """Raises SpecgenError if the module is named as a path, with the name to take."""
    if not re.search(r"[/\\]|\.py$", module_name):
        return
    path = Path(module_name.removesuffix(".py"))
    class_name = name.partition(":")[2]
    hint = HOW
    if all(part.isidentifier() for part in path.parts):
        hint = f"Take {'.'.join(path.parts)}:{class_name}"
    elif path.name.isidentifier():
        hint = f"Take {path.name}:{class_name}, with PYTHONPATH={path.parent}"
    raise SpecgenError(f"{module_name} is a path: a method's module is named as for import", hint)


def _failed(module_name: str, error: BaseException) -> SpecgenError:
    return SpecgenError(
        f"the import of {module_name} fails with {_in_words(error)}",
        f'Try it: python -c "import {module_name}"',
    )


def failure(error: BaseException, methods: Iterable[Method]) -> RunError | None:
    """Returns the error that names the one of the `methods` in whose module `error` was raised, and
    the place there; None if it was raised in none of their modules."""
    names = {type(method).__module__: method.name for method in methods}
    own = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in names:
            own = trace
        trace = trace.tb_next
    if own is None:
        return None
    name = names[own.tb_frame.f_globals["__name__"]]
    problem = f"{name} raised {_type_and_text(error)} ({_place_of(own)})"
    return RunError(problem, "Mend the method, or leave it out")


def _in_words(error: BaseException) -> str:
    """Returns the type and the text of an error, and the line that raised it."""
    trace = error.__traceback__
    if trace is None or isinstance(error, SyntaxError):  # its text names the line
        return _type_and_text(error)
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{_type_and_text(error)} ({_place_of(trace)})"


def _type_and_text(error: BaseException) -> str:
    text = one_line(str(error))
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def _place_of(trace: TracebackType) -> str:
    return f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"


def _is_method(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Method)


def _place(module: ModuleType) -> str:
    path = getattr(module, "__file__", None)
    return f"the module {module.__name__}" + (f" ({path})" if path else "")


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"the package {point.dist.name}"


def _check_settings(method: Method, name: str) -> None:
    """Raises SpecgenError if the class describes its settings wrongly."""
    settings = method.settings
    problem = ""
    if not isinstance(settings, Mapping):
        problem = "settings is no dictionary of Setting objects by name"
    else:
        problem = next(_problems(settings.items()), "")
    if problem:
        raise SpecgenError(
            f"{name}: {problem}", "See Setting in specgen/base/settings.py, and specgen/methods"
        )


def _problems(settings: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yields what is wrong with settings by name."""
    for key, setting in settings:
        if not isinstance(key, str) or not key.isidentifier():
            yield f"the setting {key!r} has no name that can be written NAME=VALUE"
        elif key in _TAKEN:
            yield f"the setting {key!r} needs another name: this one is taken"
        elif not isinstance(setting, Setting):
            yield f"the setting {key!r} is no Setting, but {setting!r}"
        else:
            try:
                setting.parse(key, setting.default)
            except SpecgenError as error:
                yield f"the default of a setting is wrong: {error}"
