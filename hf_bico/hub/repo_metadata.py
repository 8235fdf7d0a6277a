"""Read what a repo's own files say about it: adapter or not, base, data set, class names, licence.

Reads configurations and cards in a folder; makes no request and opens no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_bico.errors import BaseUnknownError, DataUnknownError, LineageError, SeveralBasesError, SeveralDataSetsError
from hf_bico.hub.references import hub_reference
from hf_bico.utils.files import read_card_metadata, read_object

ADAPTER_CONFIG = "adapter_config.json"

_LOADERS = {
    *("imagefolder", "audiofolder", "videofolder", "webdataset"),
    *("generator", "json", "csv", "parquet", "arrow", "text", "pandas", "xml"),
}
"""Names of `datasets` builders, which training scripts write into cards for local data."""
_PLACEHOLDER = re.compile(r"(?i)label[_ ]?\d+|\d+")
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORD = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class RepoMetadata:
    """The metadata in a repo's files; a field is empty if no file gives it."""

    adapter: bool = False
    bases: tuple[str, ...] = ()
    bases_from: str = ""
    """The file that names the bases."""
    data_sets: tuple[str, ...] = ()
    head_names: tuple[str, ...] = ()
    """The names of a classifier's classes in its head's order, even if they only count."""
    license: str | None = None
    license_name: str | None = None
    language: tuple[str, ...] = ()
    pipeline: str | None = None
    quantized: bool = False
    adapter_base: str = ""
    """The base in `adapter_config.json`: a Hub id or a folder."""
    named_as: str = ""
    """What any of its files names as the base, be it a Hub id or not."""
    problem: str | None = None
    """Why the card's metadata could not be read."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The head's names of classes; none if they only count."""
        return () if only_count(self.head_names) else self.head_names


def read_metadata(folder: Path, own_name: str = "") -> RepoMetadata:
    """Read `adapter_config.json`, the card and `config.json`; missing and broken files count as empty."""
    adapter, config = _read_json(folder / ADAPTER_CONFIG), _read_json(folder / "config.json")
    card, problem = _read_card(folder / "README.md")
    named = [
        (ADAPTER_CONFIG, _texts(adapter.get("base_model_name_or_path"))),
        ("card", _texts(card.get("base_model"))),
        ("config.json", _texts(config.get("_name_or_path"))),
    ]
    repos = [(file, _repos(names, own_name)) for file, names in named]
    bases_from, bases = next(((file, names) for file, names in repos if names), ("", ()))
    return RepoMetadata(
        adapter=bool(adapter),
        bases=bases,
        bases_from=bases_from,
        data_sets=_texts(card.get("datasets")),
        head_names=head_names(config.get("id2label")),
        license=_word(card.get("license")),
        license_name=_word(card.get("license_name")),
        language=tuple(name for name in _texts(card.get("language")) if _word(name)),
        pipeline=_word(card.get("pipeline_tag")),
        quantized=bool(config.get("quantization_config")) or card.get("base_model_relation") == "quantized",
        adapter_base=next(iter(_texts(adapter.get("base_model_name_or_path"))), ""),
        named_as=next((text for _, texts in named for text in texts), ""),
        problem=problem,
    )


def base_of(metadata: RepoMetadata, name: str) -> str:
    """Return the base that a repo names; raise if it names none or several."""
    if not metadata.bases:
        because = f" (its card cannot be read: {metadata.problem})" if metadata.problem else ""
        raise BaseUnknownError(
            f"'{name}' does not say which model it was fine-tuned from{because}", "name that model with --base"
        )
    if len(metadata.bases) > 1:
        raise SeveralBasesError(
            f"the {metadata.bases_from} of '{name}' names several bases: {', '.join(metadata.bases)}",
            "choose the one that was fine-tuned with --base",
        )
    return metadata.bases[0]


def data_of(metadata: RepoMetadata, name: str) -> str | LineageError:
    """Return the data set that a repo's card names, or an error if it names none or several."""
    repos = _repos([data for data in metadata.data_sets if data.lower() not in _LOADERS])
    if len(repos) == 1:
        return repos[0]
    if repos:
        return SeveralDataSetsError(
            f"the card of '{name}' names several data sets: {', '.join(repos)}",
            "choose the one to calibrate on with --data",
        )
    only = f" a repo (only {', '.join(map(repr, metadata.data_sets[:3]))})" if metadata.data_sets else " one"
    because = f": {metadata.problem}" if metadata.problem else ""
    return DataUnknownError(
        f"no calibration data was given, and the card of '{name}' does not name{only}{because}",
        "name a data set with --data",
    )


def _repos(names: Sequence[str], exclude: str = "") -> tuple[str, ...]:
    """Return the names that are Hub ids, without repeats."""
    references = (hub_reference(name) for name in names)
    return tuple(dict.fromkeys(str(reference) for reference in references if reference and reference.id != exclude))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}  # code that needs the file reports that it is broken


def _read_card(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return the card's metadata, or why they cannot be read."""
    if not file.is_file():
        return {}, None
    try:
        return read_card_metadata(file), None
    except (ValueError, OSError) as error:
        return {}, f"its metadata are not YAML: {' '.join(str(error).split())[:120]}"


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a text or a list, without repeats; empty for anything else."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(text.strip() for text in values if isinstance(text, str) and text.strip()))


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def head_names(labels: Any) -> tuple[str, ...]:
    """Return the names of `id2label` in order; none if it does not name every class."""
    if not isinstance(labels, dict) or not all(_NUMBER.fullmatch(str(key)) for key in labels):
        return ()
    by_number = {int(key): name for key, name in labels.items()}
    names: list[Any] = [by_number.get(number) for number in range(len(labels))]
    named = all(isinstance(name, str) and name.strip() for name in names)
    return tuple(names) if named else ()


def only_count(names: Sequence[str]) -> bool:
    """Return whether class names are only numbers.

    >>> only_count(["LABEL_0", "1"]), only_count(["cat", "dog"])
    (True, False)
    """
    return all(_PLACEHOLDER.fullmatch(name) for name in names)
