"""What somebody may have meant by a word: the known one that is most like it. Knows no words itself."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most like this one, whatever the case of its letters.

    >>> near("Thesus", ["naive", "theseus"])
    'theseus'
    """
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The question as a remedy, or another remedy where no word is like this one.

    >>> did_you_mean("biko", ["bico", "naive"], "use a method")
    "did you mean 'bico'?"
    """
    found = near(word, known)
    return otherwise if found is None else f"did you mean '{found}'?"
