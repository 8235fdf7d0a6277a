"""Render templates to text, and decide what a card may name: repos of the Hub with their commits, folders by name.

Text that is not known to be Markdown is escaped. Knows entries of records; neither jobs nor metadata.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias, TypeVar

import yaml
from jinja2 import PackageLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from hf_bico.errors import UsageError
from hf_bico.hub.references import hub_reference, is_repo_id
from hf_bico.reports.record import DataRecord, ModelRecord, OutputRecord, UnlabelledRecord
from hf_bico.settings import METHODS, OPTIONS, Option, read_lines
from hf_bico.utils.text import Markdown, clean, code, fenced, literal, plain

HUB_URL = "https://huggingface.co/"
PROJECT_URL = "https://github.com/hf-bico/hf-bico"
PAPER = "2605.28444"
"""The paper's number on arXiv; the Hub gives the tag `arxiv:NUMBER` to a repo whose card links to it."""
FILE_NAME = re.compile(r"[\w.-]{1,96}", re.ASCII)
WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
_HEX = re.compile(r"[0-9a-f]{7,64}")
_NO_NAMES = frozenset(("", ".", "..", "data"))
"""Names that tell a reader nothing: rows that are passed from Python are called "data"."""
_LOCAL_KINDS = {"adapter": "a local adapter", "delta": "a local task vector"}

Entry: TypeAlias = ModelRecord | DataRecord | UnlabelledRecord
EntryT = TypeVar("EntryT", ModelRecord, DataRecord, UnlabelledRecord)
CommandWord = tuple[Entry | None, str]
"""The model or data set that a word of a command line names, and a placeholder for it."""


def public_entry(entry: EntryT, local: str) -> EntryT:
    """Return a repo of the Hub as it is, and anything else by its last name, or by `local` if that says nothing.

    >>> public_entry(ModelRecord("/home/me/my-tune"), "a local model").id
    'my-tune'
    """
    if _HEX.fullmatch(str(entry.commit)) and is_repo_id(entry.id):
        return entry
    name = clean(re.split(r"[/\\]", entry.id.rstrip("/\\"))[-1], 96)
    return replace(entry, id=local if name in _NO_NAMES else name, commit=None)


def public_source(source: ModelRecord) -> ModelRecord:
    """Return a fine-tuned model, adapter or task vector and its base without local names."""
    base = None if source.base is None else public_entry(source.base, "a local model")
    return replace(public_entry(source, _LOCAL_KINDS.get(source.kind or "", "a local fine-tuned model")), base=base)


def public_output(output: OutputRecord) -> OutputRecord:
    return output if is_repo_id(output.repo or "") else replace(output, repo=None)


def kind_of(source: ModelRecord) -> str:
    """Return the kind of a source in words: "an adapter (LORA)"."""
    if source.kind == "adapter":
        return f"an adapter ({clean(source.peft_type, 24)})" if source.peft_type else "an adapter"
    return "a task vector" if source.kind == "delta" else "fine-tuned"


def public_command(
    command: str | None, job: str, given: Sequence[CommandWord], options: Mapping[str, CommandWord]
) -> str | None:
    """Build the command line anew from its words, each checked, for readers to run; None if one is not of this job.

    `given` are its arguments, in order, which come before any option. A placeholder stands for text that is no plain
    name.
    """
    try:
        split = shlex.split(command or "")
    except ValueError:
        return None
    words = [part for word in split for part in (word.split("=", 1) if word.startswith("--") else [word])]
    arguments, rest = words[2 : 2 + len(given)], words[2 + len(given) :]
    if words[:2] != ["hf-bico", job] or len(arguments) < len(given) or any(word[:1] == "-" for word in arguments):
        return None
    public = [_public_word(word, meaning) for word, meaning in zip(arguments, given, strict=True)]
    named, following = {**options, "-o": (None, "FOLDER")}, iter(rest)
    try:
        for word in following:
            public.append(word)
            if word in named:
                public.append(_public_word(next(following), named[word]))
            elif word not in _FLAGS[job]:
                public.append(_checked_value(word, next(following), _VALUES[job][word]))
    except (KeyError, StopIteration, ValueError, UsageError):
        return None
    return clean(shlex.join([*words[:2], *public]), 2000)


def _public_word(word: str, meaning: CommandWord) -> str:
    entry, placeholder = meaning
    reference = hub_reference(word)
    if entry is not None and entry.commit:
        return str(reference) if reference is not None and reference.id == entry.id else placeholder
    return word if entry is not None and word == entry.id and _FOLDER_NAME.fullmatch(word) else placeholder


_FOLDER_NAME = re.compile(r"[\w.][\w .+-]{0,95}")
_PLAIN_NAME = re.compile(r"[\w.+][\w ./,:=+-]{0,99}")
_TYPED = {known.typed_as(name): known for name, known in OPTIONS.items()}
_FLAGS = {
    "port": {"--allow-pickle", *(option for option, known in _TYPED.items() if known.type is bool)},
    "extract": {"--everything", "--allow-pickle"},
    "apply": {"--allow-pickle"},
}
_VALUES: dict[str, Mapping[str, Option | None]] = {
    "port": {option: known for option, known in _TYPED.items() if known.type is not bool},
    "extract": {"--rank": _TYPED["--rank"]},
    "apply": {"--weights": None, **{option: _TYPED[option] for option in ("--alpha", "--format", "--rank")}},
}
"""The options of each command that take a value; None for those that no setting declares, which are numbers."""


def _checked_value(option: str, word: str, known: Option | None) -> str:
    """Return what may stand behind an option: the word, or a placeholder; raise an error if it is no value of it."""
    if known is None:
        return ",".join(repr(float(number)) for number in word.split(","))
    if known.read is read_lines:
        return "FILE"
    if known.read is not None:
        known.read(word, option)
        return word
    if known.type is not str:
        known.type(word)
        return word
    if known.choices is not None and known.choices is not METHODS and word not in known.all_choices:
        raise ValueError(word)
    return word if _PLAIN_NAME.fullmatch(word) else option.strip("-").upper()


def named(entry: Entry) -> Markdown:
    """Return the name of a repo or of a local folder, which as a code span is told from the words around it."""
    return plain(entry.id) if entry.commit or entry.id.startswith("a local ") else code(entry.id, 96)


def link(entry: Entry) -> Markdown:
    """Return a link to a repo and to its commit, or the name of a local one."""
    if not entry.commit:
        return plain(entry.id if entry.id.startswith("a local ") else f"{entry.id} (local)")
    address = HUB_URL + ("" if isinstance(entry, ModelRecord) else "datasets/") + entry.id
    return Markdown(f"[{plain(entry.id)}]({address}) at [`{entry.commit[:7]}`]({address}/tree/{entry.commit})")


def digests(files: Mapping[str, str], most: int = 4) -> Markdown:
    """Return the first digits of each file's SHA-256."""
    known = [
        f"{code(name) if FILE_NAME.fullmatch(name) else plain(name, 60)} `{digest[:16]}`"
        for name, digest in files.items()
        if _HEX.fullmatch(digest)
    ]
    more = [f"{len(known) - most} more in `bico.json`"] if len(known) > most else []
    return Markdown(", ".join(known[:most] + more))


def render(template: str, metadata: Mapping[str, Any], **values: Any) -> str:
    """Render a whole card."""
    return with_metadata(metadata, _environment().get_template(template).render(**values))


def with_metadata(metadata: Mapping[str, Any], body: str) -> str:
    """Put metadata above a card's body, without entries that have no value."""
    known = {key: value for key, value in metadata.items() if value}
    # not by ModelCardData: it merges the results of two protocols, reorders them and breaks long lines
    head = yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=float("inf"))
    return f"---\n{head}---\n\n{body}"


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        loader=PackageLoader("hf_bico.reports.model_cards", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markdown) else plain(value),
    )
    environment.globals |= {"project_url": Markdown(PROJECT_URL), "paper": PAPER}
    environment.filters |= {filter.__name__: filter for filter in (plain, code, literal, fenced, link, named, digests)}
    environment.filters |= {
        "rendered": Markdown,
        "arguments": lambda texts: Markdown(", ".join(map(literal, texts))),
        "percent": lambda value: f"{value:.1%}",
        "count": lambda value: f"{value:,}",
        "seconds": _seconds,
    }
    return environment


def _seconds(value: float) -> str:
    if value < 0.05:
        return "less than 0.1 seconds"
    return f"{value:.1f} seconds" if value < 120 else f"{value / 60:.1f} minutes"
