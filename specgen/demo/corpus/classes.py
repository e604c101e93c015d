"""Small classes for the corpus' code."""

from __future__ import annotations

import random
from string import Template
from textwrap import indent

_METHODS = [
    'def get_$a(self):\n    """Return the $a."""\n    return self.$a',
    'def set_$a(self, $a):\n    """Set the $a."""\n    self.$a = $a',
    "def __eq__(self, other):\n    return self.$a == other.$a and self.$b == other.$b",
    "def __str__(self):\n    return str(self.$a)",
    'def has_$a(self):\n    """Return True if there is a $a."""\n    return self.$a is not None',
]
_NUMBERS = [
    *_METHODS,
    "def __add__(self, other):\n    return self.$a + other.$a",
    "def __lt__(self, other):\n    return self.$a < other.$a",
    'def add_to_$a(self, amount):\n    """Add an amount to the $a."""\n    self.$a += amount',
    'def total(self):\n    """Return the sum of $a and $b."""\n    return self.$a + self.$b',
    'def area(self):\n    """Return the product of $a and $b."""\n    return self.$a * self.$b',
]
_COLLECTION = [
    'def append(self, item):\n    """Add an item."""\n    self.items.append(item)',
    'def pop(self):\n    """Remove the last item and return it."""\n    return self.items.pop()',
    'def peek(self):\n    """Return the last item, or None."""\n'
    "    if not self.items:\n        return None\n    return self.items[-1]",
    "def __len__(self):\n    return len(self.items)",
    "def __iter__(self):\n    return iter(self.items)",
    'def is_empty(self):\n    """Return True if there are no items."""\n    return len(self.items) == 0',
    'def clear(self):\n    """Remove all items."""\n    self.items = []',
]

_CLASSES: list[tuple[str, str, list[str], list[str]]] = [
    ("Point", "A point in the plane", ["x", "y", "z"], _NUMBERS),
    ("Rectangle", "A rectangle with a width and a height", ["width", "height"], _NUMBERS),
    ("Circle", "A circle", ["radius", "x", "y"], _NUMBERS),
    ("Account", "A bank account", ["owner", "balance", "limit"], _METHODS),
    ("Person", "A person with a name", ["name", "age", "town"], _METHODS),
    ("Book", "A book in a library", ["title", "author", "year"], _METHODS),
    ("Song", "A song", ["title", "artist", "length"], _METHODS),
    ("Car", "A car", ["model", "speed", "color"], _METHODS),
    ("Player", "A player in a game", ["name", "score", "level"], _METHODS),
    ("Product", "Something that a shop sells", ["name", "price", "stock"], _METHODS),
    ("Stack", "A stack of items", ["items", "size"], _COLLECTION),
    ("Queue", "A queue of items", ["items", "limit"], _COLLECTION),
    ("Box", "A box that holds items", ["items", "label"], _COLLECTION),
]
"""Name, docstring, fields and methods of a class."""


def example_class(rng: random.Random) -> str:
    """A small class with a docstring and a few methods."""
    name, said, fields, methods = rng.choice(_CLASSES)
    fields = rng.sample(fields, rng.randint(2, len(fields)))
    chosen = rng.sample(methods, rng.randint(1, len(methods)))
    parts = [f"def __init__(self, {', '.join(fields)}):\n" + "\n".join(f"    self.{field} = {field}" for field in fields)]
    if rng.random() < 0.5:
        shown = ", ".join(f"{{self.{field}!r}}" for field in fields)
        parts.append(f'def __repr__(self):\n    return f"{name}({shown})"')
    parts += [Template(method).substitute(a=rng.choice(fields), b=rng.choice(fields)) for method in chosen]
    parts[1:] = rng.sample(parts[1:], len(parts) - 1)
    doc = f'"""{said}."""\n\n'
    return f"class {name}:\n" + indent(doc + "\n\n".join(parts), "    ")
