"""What stands in a page of the documentation: its blocks of code, commands, links and options. Runs nothing.

Code stands between fences, of one of these languages; all blocks of a page belong together, in order:
- console: a transcript. A line that begins with `$ ` is a command (a backslash at its end goes on in the next line),
  the lines after it are what it prints on stdout; a line `...` alone stands for any lines.
- sh: commands to copy. Lines that begin with `hf-bico ` are run and must succeed; others begin as in NOT_RUN.
- python: run as it stands, all blocks of a page in one namespace.
- output: what the python block before it prints; `...` as in a transcript.
- json, yaml: must parse.
- text: anything else; never run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
from markdown_it import MarkdownIt
from markdown_it.token import Token

from support import ROOT

LANGUAGES = ("console", "sh", "python", "output", "json", "yaml", "text")
NOT_RUN = (
    *("#", "pip install ", "make ", "hf auth login", "hf extensions install ", "export ", "cd ", "git clone "),
    ". .venv/bin/activate",
)
"""How a line of ```sh may begin, beside `hf-bico` and `python FILE`."""


@dataclass(frozen=True)
class Block:
    """A block of code: what is between the fences, and where; `language` is None where it is only indented."""

    language: str | None
    text: str
    first_line: int
    """Of the code itself, counted from 0."""
    length: int
    indent: str

    @property
    def fence_line(self) -> int:
        """The line above it, as people count."""
        return self.first_line


@dataclass(frozen=True)
class Shown:
    """A command of a transcript as it was typed, with the output that the page shows."""

    typed: list[str]
    command: str | None
    output: list[str]
    blank_lines: int
    is_last: bool


@cache
def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def read_blocks(text: str) -> list[Block]:
    """The blocks of code of a page, in order."""
    lines, blocks = text.splitlines(), []
    for token in _tokens(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        first, end = token.map
        if token.type == "code_block":
            blocks.append(Block(None, token.content, first, end - first, ""))
            continue
        indent = re.match(r"\s*", lines[first])
        length = len(token.content.splitlines())
        blocks.append(Block(token.info.strip(), token.content, first + 1, length, indent[0] if indent else ""))
    return blocks


def read_transcript(text: str) -> list[Shown]:
    """The commands of a ```console block, each with its output."""
    parts: list[tuple[list[str], list[str]]] = []
    going_on = False
    for line in text.splitlines():
        if going_on:
            parts[-1][0].append(line)
        elif line.startswith("$ "):
            parts.append(([line], []))
        else:
            if not parts:
                parts.append(([], []))
            parts[-1][1].append(line.rstrip())
            continue
        going_on = line.endswith("\\")
    return [_shown(typed, output, number == len(parts) - 1) for number, (typed, output) in enumerate(parts)]


def _shown(typed: list[str], output: list[str], is_last: bool) -> Shown:
    kept = list(output)
    while kept and not kept[-1]:
        kept.pop()
    command = "\n".join(typed).replace("\\\n", " ")[2:] if typed else None
    return Shown(typed, command, kept, len(output) - len(kept), is_last)


def read_sh(text: str) -> list[str]:
    """The commands of a ```sh block; a line that ends with a backslash goes on."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def contract_problems(text: str) -> list[str]:
    """What of the code does not stand as code stands in our pages."""
    problems = [
        f"line {token.map[0] + 1}: HTML, in which code would not be seen"
        for token in _tokens(text)
        if token.type == "html_block" and token.map is not None
    ]
    for block in read_blocks(text):
        if block.language is None:
            problems.append(f"line {block.first_line + 1}: indented code; use a fence")
        elif block.language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            problems.append(f"line {block.fence_line}: a fence of '{block.language}'; there are {known}")
        elif block.language == "text" and re.search(r"^\$ hf-bico ", block.text, re.MULTILINE):
            problems.append(f"line {block.fence_line}: a transcript that nobody runs; use ```console")
        elif block.language == "sh":
            problems += [
                f"line {block.fence_line}: {problem}" for line in read_sh(block.text) if (problem := _sh(line))
            ]
    return problems


def _sh(line: str) -> str | None:
    """What is wrong with a line of ```sh, if anything."""
    if line.startswith("make "):
        missing = sorted(set(shlex.split(line, comments=True)[1:]) - make_targets())
        return f"the Makefile has no {', '.join(missing)}" if missing else None
    if line.startswith("python "):
        file = line.split()[1]
        return None if (ROOT / file).is_file() else f"there is no {file}"
    if not line.startswith("hf-bico ") and re.search(r"(&&|;|\|)\s*hf-bico ", line):
        return f"'{line}' runs hf-bico where it is not seen"
    return None if line.startswith(("hf-bico ", *NOT_RUN)) else f"'{line}' begins with none of {', '.join(NOT_RUN)}"


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _inline(text: str) -> Iterator[Token]:
    for token in _tokens(text):
        yield from token.children or ()


def inline_code(text: str) -> list[str]:
    """Everything between single backquotes, on one line."""
    return [" ".join(token.content.split()) for token in _inline(text) if token.type == "code_inline"]


def commands(text: str) -> list[str]:
    """Every command of hf-bico that a page shows, in its blocks or between backquotes."""
    found = [line for block in read_blocks(text) if block.language == "sh" for line in read_sh(block.text)]
    for block in read_blocks(text):
        if block.language == "console":
            found += [shown.command for shown in read_transcript(block.text) if shown.command is not None]
    return [line for line in found if line.startswith("hf-bico ")] + inline_code(text)


def links(text: str) -> list[str]:
    """Where links and pictures of a page lead."""
    addresses = [token.attrGet("href") or token.attrGet("src") for token in _inline(text)]
    return [str(address) for address in addresses if address]


def anchors(text: str) -> set[str]:
    """The names by which headings can be linked to, made as GitHub makes them."""
    names: dict[str, int] = {}
    tokens = _tokens(text)
    for heading, content in pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(child.content for child in content.children or ())
            name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            names[name] = names.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, count in names.items() for number in range(count + 1)}


def dead_links(page: Path) -> list[str]:
    """Links to files that are not there, or to headings that are not there; addresses elsewhere are not looked at."""
    dead = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if link.startswith("https://"):
            continue
        is_there = file.exists() and (
            not anchor or (file.suffix == ".md" and anchor in anchors(file.read_text(encoding="utf-8")))
        )
        if not is_there:
            dead.append(link)
    return dead


def unknown_options(text: str) -> list[str]:
    """Options, and values of options with a fixed choice, that a page names and the command line does not have."""
    from hf_bico.cli.main import main

    unknown = []
    for code in commands(text):
        words = re.sub(r"^(hf-bico|hf bico) ", "", code).split()
        known: list[click.Command] = []
        if words and words[0] in main.commands:
            known = [main.commands[words[0]]]
        elif code.startswith("-"):
            known = list(main.commands.values())
        elif code.startswith("hf-bico "):
            known = [main]
        if known:
            unknown += [f"{problem} in '{code}'" for problem in _unknown(words, known)]
    return unknown


def _unknown(words: list[str], known: list[click.Command]) -> list[str]:
    options: dict[str, list[click.Option]] = {"--help": [], "-h": []}
    for command in known:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for name in (*parameter.opts, *parameter.secondary_opts):
                    options.setdefault(name, []).append(parameter)
    if isinstance(known[0], click.Group) and words and words[0] not in options:
        return [f"no command {words[0]}"] if words[0].islower() else []
    problems = []
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word == "#":
            break
        for name in re.split(r"[/|]", word):
            if not re.fullmatch(r"--?[a-z][a-z-]*", name):
                continue
            if name not in options:
                problems.append(f"no option {name}")
                continue
            choices = {
                str(choice)
                for option in options[name]
                if isinstance(option.type, click.Choice)
                for choice in option.type.choices
            }
            given = [part for part in value.split("|") if re.fullmatch(r"[a-z][a-z-]*", part)]
            problems += [f"no {name} {part}" for part in given if choices and part not in choices]
    return problems
