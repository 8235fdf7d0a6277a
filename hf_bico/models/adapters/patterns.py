"""Match module names with the names and expressions that a configuration lists, as peft does, however many there are.

Names are looked up. Expressions may never end: they are tried in a sandbox first, by the engine that will match them.
Knows texts; no adapter, no torch, no peft.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from hf_bico.errors import AdapterError
from hf_bico.models.sandbox import Sandbox

EXPRESSION_SECONDS = 5.0
"""The limit for all names of a model: real adapters take milliseconds."""
BROKEN = (re.error, OverflowError, RecursionError)
"""What `re` raises for an invalid expression."""
_NAME = re.compile(r"(\^?)((?:[\w\- .]|\\[.\- ])+)")
_ANY = "\0"
"""Stands for a dot, which matches any character unless it is escaped."""
_MOST_FORMS = 200
_MATCH = """
import re

def answer(question):
    expressions, names = question
    for expression in expressions:
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError):
            continue  # reported when it is used
        for name in names:
            pattern.match(name), pattern.fullmatch(name)
"""


def endings(name: str) -> Iterator[str]:
    """Yield a name, and what follows each of its dots.

    >>> list(endings("layers.0.q"))
    ['layers.0.q', '0.q', 'q']
    """
    yield name
    yield from (name[index + 1 :] for index, letter in enumerate(name) if letter == ".")


class Patterns:
    """Texts that peft matches with names, as expressions for a name's end or, if `inside`, for modules of its path.

    >>> Patterns(["layers.0.q", r".*1\\.q", "q"]).first("model.layers.1.q")
    '.*1\\\\.q'
    """

    def __init__(self, texts: Iterable[str], inside: bool = False) -> None:
        before, after = (r"(^|.*\.)", r"($|\..*)") if inside else (r"(.*\.)?(", ")$")
        self._inside = inside
        self._texts = list(dict.fromkeys(texts))
        self._names: dict[str, int] = {}
        self._forms: dict[int, set[tuple[int, ...]]] = {}
        self._expressions: dict[str, int] = {}
        forms = 0
        for number, text in enumerate(self._texts):
            match = _NAME.fullmatch(text)
            if match is not None:
                name = _spelled(match[2])
                form = tuple(dot.start() for dot in re.finditer(_ANY, name)) if _ANY in name else ()
                known = self._forms.setdefault(len(name), set())
                if form in known or forms < _MOST_FORMS:  # each form is tried with each name
                    forms += form not in known
                    known.add(form)
                    self._names.setdefault(match[1] + name, number)
                    continue
            self._expressions[f"{before}{text}{after}"] = number

    @property
    def expressions(self) -> list[str]:
        """The texts that are matched as expressions, with what peft puts around them."""
        return list(self._expressions)

    def first(self, name: str) -> str | None:
        """Return the first text that matches; an invalid expression raises one of BROKEN."""
        spelled = [self._names[reading] for reading in self._readings(name) if reading in self._names]
        found = min(spelled, default=len(self._texts))
        earlier = ((number, pattern) for number, pattern in self._compiled if number < found)
        found = next((number for number, pattern in earlier if pattern.match(name)), found)
        return self._texts[found] if found < len(self._texts) else None

    @cached_property
    def _compiled(self) -> list[tuple[int, re.Pattern[str]]]:
        return [(number, re.compile(text)) for text, number in self._expressions.items()]

    def _readings(self, name: str) -> Iterator[str]:
        """Yield each part of a name as the keys of `_names` would spell it."""
        for ending in endings(name):
            start = len(name) - len(ending)
            ends = [place for place, letter in enumerate(ending) if letter == "."] if self._inside else []
            for part in (ending, *(ending[:end] for end in ends)):
                for form in self._forms.get(len(part), ()):
                    letters = list(part)
                    for place in form:
                        letters[place] = _ANY
                    reading = "".join(letters)
                    yield from (reading, f"^{reading}") if start == 0 else (reading,)


def _spelled(text: str) -> str:
    """Return the name that a text matches, with _ANY for dots that are not escaped."""
    if "\\" not in text:
        return text.replace(".", _ANY)
    return re.sub(r"\\(.)|\.", lambda found: found[1] or _ANY, text)


def require_quick(expressions: Iterable[str], names: Iterable[str], called: str) -> None:
    """Refuse expressions that take too long to match these names."""
    tried = list(expressions)
    if not tried:
        return
    with Sandbox(_MATCH, "-I", "-S") as sandbox:  # isolated: none of the user's packages or settings are loaded
        try:
            sandbox.ask([tried, list(names)], EXPRESSION_SECONDS)
            return
        except TimeoutError:
            problem = f"cannot be matched within {EXPRESSION_SECONDS:g} seconds"
        except (EOFError, OSError, ValueError):
            problem = "cannot be matched"
    raise AdapterError(
        f"the expressions in the configuration of '{called}' {problem}", "list the names of the modules there instead"
    )


def is_name(text: str) -> bool:
    """Tell whether a text is a name, rather than an expression that could take long."""
    return _NAME.fullmatch(text) is not None
