"""Where a fine-tuned model comes from, by its own files: adapter or not, base, data set, class names, licence.

Reads configurations and cards in a folder; asks nobody and opens no weight.
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

LOADERS = (
    *("generator", "imagefolder", "audiofolder", "videofolder", "webdataset"),
    *("json", "csv", "parquet", "arrow", "text", "pandas", "xml"),
)
"""What training scripts write as the data set when it was none of the Hub's."""
_PLACEHOLDER = re.compile(r"(?i)label[_ ]?\d+|\d+")
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORD = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class RepoMetadata:
    """What a repo's files say about it; what they do not say is empty."""

    adapter: bool = False
    bases: tuple[str, ...] = ()
    bases_from: str = ""
    """The file that names them."""
    data_sets: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    license: str | None = None
    license_name: str | None = None
    language: tuple[str, ...] = ()
    pipeline: str | None = None
    quantized: bool = False
    adapter_base: str = ""
    """What an adapter's own configuration calls its base: an id of the Hub, or a folder."""
    problem: str | None = None
    """Why the card's metadata could not be read."""


def read_metadata(folder: Path, own_name: str = "") -> RepoMetadata:
    """Read `adapter_config.json`, the card and `config.json` of a repo, as far as they are there and sane."""
    adapter, config = _read_json(folder / ADAPTER_CONFIG), _read_json(folder / "config.json")
    card, problem = _read_card(folder / "README.md")
    named = [
        (ADAPTER_CONFIG, _texts(adapter.get("base_model_name_or_path"))),
        ("card", _texts(card.get("base_model"))),
        ("config.json", _texts(config.get("_name_or_path"))),
    ]
    usable = [(file, _repos(names, own_name)) for file, names in named]
    bases_from, bases = next(((file, names) for file, names in usable if names), ("", ()))
    return RepoMetadata(
        adapter=bool(adapter),
        bases=bases,
        bases_from=bases_from,
        data_sets=_texts(card.get("datasets")),
        class_names=_class_names(config.get("id2label")),
        license=_word(card.get("license")),
        license_name=_word(card.get("license_name")),
        language=tuple(name for name in _texts(card.get("language")) if _word(name)),
        pipeline=_word(card.get("pipeline_tag")),
        quantized=bool(config.get("quantization_config")) or card.get("base_model_relation") == "quantized",
        adapter_base=next(iter(_texts(adapter.get("base_model_name_or_path"))), ""),
        problem=problem,
    )


def base_of(origin: RepoMetadata, name: str) -> str:
    """The one base that a repo names."""
    if not origin.bases:
        because = f" (its card cannot be read: {origin.problem})" if origin.problem else ""
        raise BaseUnknownError(
            f"'{name}' does not say which model it was fine-tuned from{because}", "name that model with --base"
        )
    if len(origin.bases) > 1:
        raise SeveralBasesError(
            f"the {origin.bases_from} of '{name}' names several bases: {', '.join(origin.bases)}",
            "choose the one that was fine-tuned with --base",
        )
    return origin.bases[0]


def data_of(origin: RepoMetadata, name: str) -> str | LineageError:
    """The one data set that a repo's card names, or the error that says why there is none."""
    repos = _repos([data for data in origin.data_sets if data.lower() not in LOADERS])
    if len(repos) == 1:
        return repos[0]
    if repos:
        return SeveralDataSetsError(
            f"the card of '{name}' names several data sets: {', '.join(repos)}",
            "choose the one to calibrate on with --data",
        )
    only = f" a repo (only {', '.join(repr(data) for data in origin.data_sets[:3])})" if origin.data_sets else " one"
    because = f": {origin.problem}" if origin.problem else ""
    return DataUnknownError(
        f"no calibration data was given, and the card of '{name}' does not name{only}{because}",
        "name a data set with --data",
    )


def _repos(names: Sequence[str], but: str = "") -> tuple[str, ...]:
    """Those of the names that are repos of the Hub, each once."""
    found = (hub_reference(name) for name in names)
    return tuple(dict.fromkeys(str(reference) for reference in found if reference and reference.id != but))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}  # what needs the file says that it is broken


def _read_card(file: Path) -> tuple[dict[str, Any], str | None]:
    """The card's metadata, or why they cannot be read."""
    if not file.is_file():
        return {}, None
    try:
        return read_card_metadata(file), None
    except (ValueError, OSError) as error:
        return {}, f"its metadata are not YAML: {' '.join(str(error).split())[:120]}"


def _texts(value: Any) -> tuple[str, ...]:
    """One text or a list of them, without repeats; anything else counts as none."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(text.strip() for text in values if isinstance(text, str) and text.strip()))


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def _class_names(labels: Any) -> tuple[str, ...]:
    """The names of `id2label` in order, unless they only count."""
    if not isinstance(labels, dict) or not all(_NUMBER.fullmatch(str(key)) for key in labels):
        return ()
    ordered = sorted(labels.items(), key=lambda item: int(item[0]))
    names = [name for _, name in ordered]
    counted = [int(key) for key, _ in ordered] == list(range(len(names)))
    if not counted or not all(isinstance(name, str) and name.strip() for name in names):
        return ()
    return () if only_count(names) else tuple(names)


def only_count(names: Sequence[str]) -> bool:
    """Whether names of classes say nothing but their numbers.

    >>> only_count(["LABEL_0", "1"]), only_count(["cat", "dog"])
    (True, False)
    """
    return all(_PLACEHOLDER.fullmatch(name) for name in names)
