"""Read what a data set's card declares, within bounds, and check it: nothing may lead out of the repo.

`datasets` never sees a stranger's card: it reads one that is written from what was checked. Knows cards and names of
files; not what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from hf_bico.errors import DataNotFoundError
from hf_bico.utils.files import read_card_metadata, read_object, read_yaml

MAX_CARD_BYTES = 4_000_000
"""A card may declare the columns of hundreds of configurations."""
CARD, STANDALONE, LEGACY = "README.md", ".huggingface.yaml", "dataset_infos.json"
METADATA_FILES = (CARD, STANDALONE, LEGACY)
"""The files that `datasets` reads beside the data."""
_MAX_PATTERNS, _MAX_COMPARED = 10_000, 1_000_000
_PASSED = frozenset(
    (
        *("sep", "delimiter", "header", "names", "column_names", "index_col", "usecols", "skipinitialspace", "nrows"),
        *("skiprows", "skipfooter", "na_values", "keep_default_na", "na_filter", "true_values", "false_values"),
        *("skip_blank_lines", "thousands", "decimal", "lineterminator", "quotechar", "quoting", "escapechar"),
        *("doublequote", "comment", "on_bad_lines", "encoding", "encoding_errors", "field", "on_mixed_types"),
        *("keep_linebreaks", "sample_by", "columns", "drop_labels", "drop_metadata", "metadata_filenames", "features"),
    )
)
"""What a card may tell the reader of a format: how to read, but neither in which steps nor what else to open."""
_MAX_NUMBER = 100_000
"""Of a table's first lines to leave out, pandas makes a list."""
_SIZES = {"name", "num_examples", "num_bytes"}
_REFUSED = ("filters", "converters")
"""Without these other rows would be read, and they can hold anything."""
_SEPARATOR = re.compile(r"(?s).|\\[st]\+?|[^\\^$.|?*+()\[\]{}]{2,8}")
"""One letter, white space, or several letters that are no regular expression, which could take for ever."""
_ENCODING = re.compile(r"(?i)(?:utf|latin|iso|cp|windows|mac|koi|gb|big5|shift|sjis|euc|us|ascii|hz|johab)[\w-]*")
"""Others take a time that grows with the square of the text."""


@dataclass(frozen=True)
class Declared:
    """What a card says about one configuration of a data set; a field is empty if it does not say."""

    config: str
    splits: Mapping[str, Sequence[str]]
    """Patterns of file names by split."""
    folder: str | None
    """The folder in which to look for files, without patterns."""
    options: Mapping[str, Any]
    """How to read the files."""
    features: Any
    sizes: Any
    """The rows of each split."""

    def write_card(self, folder: Path, patterns: Mapping[str, str]) -> None:
        """Write a card for `datasets` into a folder, with one pattern for each split, if that is needed."""
        import yaml

        config: dict[str, Any] = {"config_name": self.config}
        if patterns:
            config["data_files"] = [{"split": split, "path": pattern} for split, pattern in patterns.items()]
        elif self.folder is not None:
            config["data_dir"] = self.folder
        else:
            return  # without a card, files of other formats are left out
        text = yaml.safe_dump({"configs": [config]}, allow_unicode=True)
        (folder / CARD).write_text(f"---\n{text}---\n", encoding="utf-8")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata of a data set's card and of the file beside it, within bounds."""
    metadata = read_card_metadata(folder / CARD, MAX_CARD_BYTES) if (folder / CARD).exists() else {}
    if (folder / STANDALONE).exists():
        metadata |= read_yaml(folder / STANDALONE, MAX_CARD_BYTES)
    _require_numbered(metadata)
    return metadata


def _require_numbered(value: Any) -> None:
    """Raise ValueError for names of classes by numbers that leave gaps: `datasets` would count up to the last."""
    if isinstance(value, dict):
        label = value.get("class_label")
        names = label.get("names") if isinstance(label, dict) else None
        if isinstance(names, dict) and any(int(number) >= len(names) for number in names):
            raise ValueError(f"it numbers classes up to {max(map(int, names)):,} and names {len(names):,}")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_numbered(inner)


def read_declared(folder: Path, name: str, config: str | None) -> Declared:
    """Return what a stranger's card declares about a configuration; refuse what leads elsewhere."""
    metadata = read_metadata(folder)
    entries = [_mapping(entry) for entry in _listed(metadata.get("configs"), "configs")]
    configs = {_text(entry.get("config_name"), "config_name"): entry for entry in entries} or {"default": {}}
    default = next((key for key, entry in configs.items() if entry.get("default") is True), None)
    chosen = choose_config(name, list(configs), config or default)
    entry = configs[chosen]
    place, pairs = entry.get("data_dir") or None, list(_patterns(entry.get("data_files")))
    for text in (*(pattern for _, patterns in pairs for pattern in patterns), *([place] if place else [])):
        _require_inside(text, name)
    splits = {split: [f"{place}/{one}" if place else one for one in patterns] for split, patterns in pairs}
    if len(splits) < len(pairs):
        raise ValueError("a split is declared twice")
    features, sizes = _info(folder, metadata.get("dataset_info"), chosen)
    options = _options(entry, name)
    return Declared(chosen, splits, place, options, options.get("features") or features, sizes)


def _info(folder: Path, infos: Any, config: str) -> tuple[Any, Any]:
    """Return the columns of a configuration, and the rows of its splits, from the card or from the older file."""
    import datasets

    given = [info for info in (infos if isinstance(infos, list) else [infos]) if isinstance(info, dict)]
    info = next((info for info in given if info.get("config_name", "default") == config), None)
    if info is not None:
        columns, splits = info.get("features"), info.get("splits")
        features = None if columns is None else datasets.Features._from_yaml_list(_without_lengths(columns))
        sized = isinstance(splits, list) and all(_SIZES.issubset(_mapping(split)) for split in splits)
        return features, datasets.SplitDict._from_yaml_list(splits) if sized else None
    legacy = read_object(folder / LEGACY) if (folder / LEGACY).exists() else {}
    if len(legacy) == 1:  # it has the repo's name
        legacy = {"default": next(iter(legacy.values()))}
    known = _mapping(legacy.get(config, {})).get("features")
    return datasets.Features.from_dict(_without_lengths(known)) if known else None, None


def choose_config(name: str, configs: Sequence[str], config: str | None) -> str:
    """Return the requested configuration, else the default or the only one."""
    listed = ", ".join(configs[:20]) + (", ..." if len(configs) > 20 else "")
    if config is not None and config not in configs:
        raise DataNotFoundError(
            f"'{name}' has no configuration '{config}'", f"use one of these with --config: {listed}"
        )
    if config is None and len(configs) > 1 and "default" not in configs:
        raise DataNotFoundError(f"'{name}' has several configurations", f"choose one with --config: {listed}")
    return config or ("default" if "default" in configs else configs[0])


def _require_inside(text: Any, name: str) -> None:
    """Refuse a pattern that is an address, or leads out of the repo."""
    outside = (
        not isinstance(text, str)
        or any(part in text for part in ("://", "::", "\\", "\0"))
        or text.startswith(("/", "~"))
        or text[1:2] == ":"
        or ".." in text.split("/")
    )
    if outside:
        raise DataNotFoundError(
            f"the card of '{name}' names a file outside of the repo: {str(text)[:200]!r}", "use another data set"
        )


def _patterns(data_files: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each split and its patterns, from all forms that a card may give them in."""
    entries = [data_files] if isinstance(data_files, str) else _listed(data_files, "data_files")
    if len(entries) > _MAX_PATTERNS:
        raise ValueError(f"data_files has {len(entries):,} entries")
    if entries and not any(isinstance(entry, dict) for entry in entries):
        yield "train", entries
        return
    for entry in map(_mapping, entries):
        path = entry.get("path")
        paths = [path] if isinstance(path, str) else _listed(path, "path")
        if len(paths) > _MAX_PATTERNS:
            raise ValueError(f"data_files has {len(paths):,} paths")
        yield _text(entry.get("split"), "split"), paths


def _options(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    options = {key: value for key, value in entry.items() if key in _PASSED}
    refused = [key for key in _REFUSED if entry.get(key)]
    refused += [key for key in ("sep", "delimiter") if not _matches(_SEPARATOR, options.get(key))]
    refused += [key for key in ("encoding",) if not _matches(_ENCODING, options.get(key))]
    refused += [key for key, value in options.items() if type(value) is int and key != "nrows" and value > _MAX_NUMBER]
    if refused:
        value = str(entry[refused[0]])[:100]
        raise DataNotFoundError(
            f"the card of '{name}' sets '{refused[0]}' to {value!r}, which is not supported", "use another data set"
        )
    if options.get("features"):
        import datasets

        options["features"] = datasets.Features._from_yaml_list(_without_lengths(options["features"]))
    return options


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None)


def _without_lengths(features: Any) -> Any:
    """Return columns without the lengths of their lists: of a column that is missing, each row would have so many."""
    if isinstance(features, dict):
        kept = {key: value for key, value in features.items() if key != "length" or not isinstance(value, int)}
        return {key: _without_lengths(value) for key, value in kept.items()}
    return [_without_lengths(one) for one in features] if isinstance(features, list) else features


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping and found {str(value)[:60]!r}")
    return value


def _listed(value: Any, name: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"'{name}' is {str(value)[:60]!r}, and no list")
    return value or []


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip("."):
        raise ValueError(f"'{name}' is {str(value)[:60]!r}, and no name")
    return value


def matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, in the order of patterns; raise FileNotFoundError if there are none.

    A name without wildcards must be there too.

    Not by regular expressions, which take for ever over some patterns and names.

    >>> matching(["data/a-1.csv", "data/b/a-2.csv", "x.csv"], ["data/**/a-*.csv"])
    ['data/a-1.csv', 'data/b/a-2.csv']
    """
    found, there = dict[str, None](), {name: name.split("/") for name in names}
    if sum(map(has_magic, patterns)) * len(there) > _MAX_COMPARED:
        raise ValueError(f"data_files has {len(patterns):,} patterns for {len(there):,} files")
    for pattern in (pattern.removeprefix("./") for pattern in patterns):
        parts = pattern.split("/")
        if has_magic(pattern):
            found.update(dict.fromkeys(sorted(name for name, own in there.items() if _fits(own, parts))))
        elif pattern in there:
            found[pattern] = None
        else:
            raise FileNotFoundError(f"the card names '{pattern}', which is not there")
    if not found:
        raise FileNotFoundError(f"no file is called as the card says: {', '.join(patterns)[:200]}")
    return list(found)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, in which `**` is any number of parts."""
    part = place = 0
    tried: tuple[int, int] | None = None
    while part < len(parts):
        if place < len(pattern) and pattern[place] == "**":
            tried, place = (part, place), place + 1
        elif place < len(pattern) and fnmatchcase(parts[part], pattern[place]):
            part, place = part + 1, place + 1
        elif tried is not None:
            tried = (tried[0] + 1, tried[1])
            part, place = tried[0], tried[1] + 1
        else:
            return False
    return all(rest == "**" for rest in pattern[place:])
