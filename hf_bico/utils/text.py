"""Format text: tables, Markdown from untrusted text, sizes in bytes, and spelling suggestions.

Knows nothing of records, cards or commands.
"""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a plain table: first column left-aligned, others right-aligned, two spaces between."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[*map(str.ljust, row[:1], widths), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$^=@]|:(?=\S)|(?<=[Ww]{3})\.)")
_RIGHT_TO_LEFT = frozenset(("R", "AL", "AN"))


# C0, DEL and C1; half a surrogate pair; what breaks a line; what has no width, or turns the text around it
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029"
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_JOINERS = "\u200c\u200d"
_SELECTORS = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_END_OF_LATIN = "\u02ff"


def wrapped(text: str, width: int, indent: int = 0, taken: int = 0) -> str:
    """Break a line between words, so that each part fits; what stands in quotes, as a command does, is not broken.

    The first line has `taken` columns less, the others are indented.

    >>> print(wrapped("log in with 'hf auth login', or set HF_TOKEN", 24))
    log in with
    'hf auth login', or set
    HF_TOKEN
    """
    lines, room = [""], width - taken
    for word in _WORD.findall(text):
        if lines[-1] and len(lines[-1]) + len(word) > room:
            lines.append(" " * indent + word.lstrip(" "))
            room = width
        else:
            lines[-1] += word
    return "\n".join(lines)


_WORD = re.compile(r" *(?:(?<!\w)'[^']*'|[^ ])+")


def visible(text: str) -> str:
    """Return one line in which nothing moves the cursor, turns or hides text: such characters are shown as escapes.

    Letters of every script stay. Joiners and variation selectors stay where they shape a letter or an emoji, which is
    behind (and joiners also before) a visible character that is not Latin.

    >>> print(visible("a\\x1b[2Jb\\nReady to port.\\u202ec"))
    a\\x1b[2Jb\\nReady to port.\\u202ec
    """
    return _HIDDEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    letter, start, end = found[0], found.start(), found.end()
    before, after = found.string[max(0, start - 1) : start], found.string[end : end + 1]
    shaped = before > _END_OF_LATIN and (not _HIDDEN.match(before) or (letter in _JOINERS and before == "\ufe0f"))
    if _SELECTORS.match(letter) and (shaped or after == "\N{COMBINING ENCLOSING KEYCAP}"):
        return letter
    if letter in _JOINERS and shaped and after > _END_OF_LATIN and not _HIDDEN.match(after):
        return letter
    return letter.encode("unicode_escape").decode("ascii")


class Markdown(str):
    """Text that is already Markdown; templates escape all other text."""


def clean(text: Any, limit: int) -> str:
    """Return one line of at most `limit` characters, without control characters."""
    line = " ".join("".join(_on_card(letter) for letter in str(text)[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _on_card(letter: str) -> str:
    kind = unicodedata.category(letter)
    if kind in ("Cc", "Zl", "Zp"):
        return " "
    if kind == "Cs" or ord(letter) & 0xFFFE == 0xFFFE:  # surrogates and noncharacters
        return "\N{REPLACEMENT CHARACTER}"
    return "" if kind in ("Cf", "Co") else letter  # bidirectional and zero-width controls, private use


def plain(text: Any, limit: int = 400) -> Markdown:
    """Escape text to one line without Markdown or HTML markup.

    >>> print(plain("a|b <c>"))
    a\\|b \\<c\\>
    """
    return Markdown(_SPECIAL.sub(r"\\\1", clean(text, limit)))


def code(text: Any, limit: int = 80) -> Markdown:
    """Return text as a code span; not for table cells, which a pipe would end.

    >>> print(code("test"), code("a`b"))
    `test` ``a`b``
    """
    line = clean(text, limit) or '""'
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if "`" in (line[0], line[-1]) else ""
    return Markdown(f"{ticks}{space}{line}{space}{ticks}")


def fenced(text: str, language: str = "") -> Markdown:
    """Return text as a code block, with a fence longer than any run of backticks in it."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return Markdown(f"{ticks}{language}\n{text.strip()}\n{ticks}")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def literal(value: str | list[str]) -> Markdown:
    """Return a Python literal of a text or a list of texts, without control characters.

    >>> print(literal(["a", 'b"', "c\\n"]))
    ["a", 'b"', "c\\n"]
    """
    if not isinstance(value, str):
        return Markdown(f"[{', '.join(literal(text) for text in value)}]")
    right_to_left = any(unicodedata.bidirectional(letter) in _RIGHT_TO_LEFT for letter in value)
    text = ascii(value) if right_to_left else repr(value)
    return Markdown(text if '"' in text else f'"{text[1:-1]}"')


def markdown_table(rows: Sequence[Sequence[str]], align: str = "---:") -> str:
    """Format a header and rows as a Markdown table; escape cells that are not `Markdown`, align all but the first.

    >>> print(markdown_table([["layer", "rank"], ["a|b", "8"]]))
    | layer | rank |
    | --- | ---: |
    | a\\|b | 8 |
    """
    lines = [[str(cell if isinstance(cell, Markdown) else plain(cell, 1000)) for cell in row] for row in rows]
    rule = ["---", *(align for _ in rows[0][1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


BETTER, BEST, WORSE = "better", "best", "worse"
_COLOURS = {BETTER: "green", BEST: "green", WORSE: "red"}
_GAP = 2


@dataclass(frozen=True)
class Line:
    """One line of a table; `mark` is BETTER, BEST, WORSE or empty, `begins` starts a group of lines."""

    cells: Sequence[str]
    mark: str = ""
    begins: bool = False


@dataclass(frozen=True)
class Table:
    """A table for rich; one too wide for the terminal is split into pieces that repeat the leading columns."""

    header: Sequence[str]
    lines: Sequence[Line]
    leading: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | str]:
        rows = [[visible(cell) for cell in row] for row in (self.header, *(line.cells for line in self.lines))]
        if any(line.mark for line in self.lines):
            rows = [[*row, mark] for row, mark in zip(rows, ("", *(line.mark for line in self.lines)), strict=True)]
        if sum(_widths(rows)) + _GAP * (len(self.header) - 1) > options.max_width:
            rows[0] = [name.replace(" ", "\n") for name in rows[0]]
        for number, columns in enumerate(_pieces(_widths(rows), options.max_width, self.leading)):
            if number:
                yield ""
            yield self._piece([[row[column] for column in columns] for row in rows])

    def _piece(self, rows: Sequence[Sequence[str]]) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, _GAP - 1))
        for number, name in enumerate(rows[0]):
            table.add_column(Text(name), justify="right" if number else "left", vertical="bottom", no_wrap=True)
        for line, cells in zip(self.lines, rows[1:], strict=True):
            if line.begins:
                table.add_section()
            colour = _COLOURS.get(line.mark, "")
            texts = [Text(cell, style=colour if cell == line.mark else "") for cell in cells]
            table.add_row(*texts, style="bold" if line.mark == BEST else "")
        return table


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)]


def _pieces(widths: Sequence[int], room: int, leading: int) -> list[list[int]]:
    """Return the columns of each piece: the leading ones, and as many others as fit, but at least one.

    >>> _pieces([10, 5, 5, 5], room=24, leading=1)
    [[0, 1, 2], [0, 3]]
    """
    first = list(range(leading))
    free = room - sum(widths[:leading]) - _GAP * (leading - 1)
    pieces, left = [[*first]], free
    for column, width in enumerate(widths[leading:], start=leading):
        if width + _GAP > left and len(pieces[-1]) > leading:
            pieces.append([*first])
            left = free
        pieces[-1].append(column)
        left -= width + _GAP
    return pieces


_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(count: float) -> str:
    """Format a number of bytes with three digits.

    >>> size_text(1_234_567)
    '1.23 MB'
    """
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def command_line(words: Iterable[str]) -> str:
    """Join words to one line that a POSIX shell reads as these words; control characters become escapes of printf.

    >>> print(command_line(["rm", "it's", "a\\nb"]))
    rm 'it'"'"'s' "$(printf 'a\\012b')"
    """
    return " ".join(shlex.quote(word) if word.isprintable() else _by_printf(word) for word in words)


def _by_printf(word: str) -> str:
    escaped = re.sub(rb"[^\w/.]", lambda found: b"\\%03o" % found[0][0], os.fsencode(word)).decode("ascii")
    return f"\"$(printf '{escaped}')\""


def is_unicode(text: str) -> bool:
    """Return whether a text can be written in UTF-8: a file's name need not be one.

    >>> is_unicode("ü"), is_unicode(os.fsdecode(b"\\xff"))
    (True, False)
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def typed_path(path: Path | str) -> str:
    """Return what to type for a folder: a name that begins with a dash would be taken for an option.

    >>> typed_path("-rf")
    './-rf'
    """
    text = str(path)
    end = "/" if text.endswith("\n") else ""  # which $(...) would cut off
    return f"./{text}{end}" if text.startswith("-") else f"{text}{end}"


def machine_memory() -> int:
    """Return the bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word most similar to this one, ignoring case.

    >>> near("Thesus", ["naive", "theseus"])
    'theseus'
    """
    by_lower = {one.lower(): one for one in known}
    matches = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy that suggests the nearest known word, or `otherwise` if none is near.

    >>> did_you_mean("biko", ["bico", "naive"], "use a method")
    "did you mean 'bico'?"
    """
    match = near(word, known)
    return otherwise if match is None else f"did you mean '{match}'?"


def count_text(number: int, what: str) -> str:
    """Return a number of things.

    >>> count_text(1, "sample"), count_text(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"
