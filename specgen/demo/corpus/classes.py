"""Small example classes for the code documents."""

from __future__ import annotations

import random
from string import Template
from textwrap import indent

_FIELD_METHODS = [
    'def get_$a(self):\n    """Return the $a."""\n    return self.$a',
    'def set_$a(self, $a):\n    """Set the $a."""\n    self.$a = $a',
    "def __eq__(self, other):\n    return self.$a == other.$a and self.$b == other.$b",
    "def __str__(self):\n    return str(self.$a)",
    'def has_$a(self):\n    """Return True if there is a $a."""\n    return self.$a is not None',
]
_NUMBER_METHODS = [
    *_FIELD_METHODS,
    "def __add__(self, other):\n    return self.$a + other.$a",
    "def __lt__(self, other):\n    return self.$a < other.$a",
    'def add_to_$a(self, amount):\n    """Add an amount to the $a."""\n    self.$a += amount',
    'def total(self):\n    """Return the sum of $a and $b."""\n    return self.$a + self.$b',
    'def area(self):\n    """Return the product of $a and $b."""\n    return self.$a * self.$b',
]
_COLLECTION_METHODS = [
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
    ("Point", "A point in the plane", ["x", "y", "z"], _NUMBER_METHODS),
    ("Rectangle", "A rectangle with a width and a height", ["width", "height"], _NUMBER_METHODS),
    ("Circle", "A circle", ["radius", "x", "y"], _NUMBER_METHODS),
    ("Account", "A bank account", ["owner", "balance", "limit"], _FIELD_METHODS),
    ("Person", "A person with a name", ["name", "age", "town"], _FIELD_METHODS),
    ("Book", "A book in a library", ["title", "author", "year"], _FIELD_METHODS),
    ("Song", "A song", ["title", "artist", "length"], _FIELD_METHODS),
    ("Car", "A car", ["model", "speed", "color"], _FIELD_METHODS),
    ("Player", "A player in a game", ["name", "score", "level"], _FIELD_METHODS),
    ("Product", "Something that a shop sells", ["name", "price", "stock"], _FIELD_METHODS),
    ("Stack", "A stack of items", ["items", "size"], _COLLECTION_METHODS),
    ("Queue", "A queue of items", ["items", "limit"], _COLLECTION_METHODS),
    ("Box", "A box that holds items", ["items", "label"], _COLLECTION_METHODS),
]
"""Name, docstring, possible fields and possible methods of each class."""


def example_class(rng: random.Random) -> str:
    """A class with a docstring, some of its possible fields and some of its possible methods, in random order."""
    name, description, fields, methods = rng.choice(_CLASSES)
    fields = rng.sample(fields, rng.randint(2, len(fields)))
    chosen = rng.sample(methods, rng.randint(1, len(methods)))
    parts = [f"def __init__(self, {', '.join(fields)}):\n" + "\n".join(f"    self.{field} = {field}" for field in fields)]
    if rng.random() < 0.5:
        shown = ", ".join(f"{{self.{field}!r}}" for field in fields)
        parts.append(f'def __repr__(self):\n    return f"{name}({shown})"')
    parts += [Template(method).substitute(a=rng.choice(fields), b=rng.choice(fields)) for method in chosen]
    parts[1:] = rng.sample(parts[1:], len(parts) - 1)
    doc = f'"""{description}."""\n\n'
    return f"class {name}:\n" + indent(doc + "\n\n".join(parts), "    ")
