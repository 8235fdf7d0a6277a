"""Open data sets by name: folders and small Hub repos whole, large ones as a list of parquet files.

Knows files, configurations and splits; not what is in the rows. No code of a repo is run.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

from hf_bico.data.declarations import METADATA_FILES, choose_config, matching, read_declared, read_metadata
from hf_bico.data.small_parquet import open_small
from hf_bico.data.unpacking import UNPACKING_ERRORS, UnpackedSize, unpacked
from hf_bico.data.zipped_images import has_images, open_zipped
from hf_bico.errors import DataNotFoundError, DownloadTooLargeError, NotCachedError, OutputError
from hf_bico.hub.client import HubRepo
from hf_bico.hub.retries import is_offline
from hf_bico.runtime.turns import changed_together
from hf_bico.utils.files import require_sound_csv, require_sound_json
from hf_bico.utils.text import size_text

SMALL_REPO = 64_000_000
"""Repos of up to so many bytes are fetched whole, and then work offline."""
CONVERTED = "refs/convert/parquet"
"""The revision of the Hub's own parquet copy of a data set."""
_PARALLEL_REQUESTS = 16
_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
"""The builder of `datasets` for a single file."""
_FOREIGN_FORMATS = ("parquet", "arrow", "json", "csv", "text", "xml", "conll", "imagefolder", "webdataset")
"""Those builders of `datasets` of which it is known what they unpack; any may be used on one's own files."""
_NOT_DATA = (".md", ".py", ".ipynb", ".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt", ".bin", "dummy_data.zip")
_CONVERTED_FILE = re.compile(r"(?P<config>[^/]+)/(?:partial-)?(?P<split>[^/]+)/\d{4,}\.parquet")
_SAVED = frozenset(("dataset_dict.json", "state.json"))
"""One of these is in a folder that save_to_disk has written."""
_OWN_FIELDS = ("name", "version", "data_dir", "data_files", "description")
"""What a builder's configuration says beside how to read files."""
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?:-\w+)?\.parquet")

READ_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    StopIteration,
    TypeError,
    ValueError,
)
"""Errors that `datasets` and the readers under it raise on files that they cannot read."""

OpenedData: TypeAlias = tuple[dict[str, Any], str | None]
"""All splits of a data set, and its configuration if that has a name."""
Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True)
class ParquetFiles:
    """The files of a Hub data set by split, and the column types if the card declares them."""

    repo: HubRepo
    config: str | None
    splits: Mapping[str, Sequence[str]]
    features: Any = None


def open_folder(path: Path, name: str, config: str | None = None) -> OpenedData:
    """Open a folder of images or of tables, one saved by `datasets`, or one table; `name` is for errors."""
    small = open_small(path) if config is None and path.is_dir() else None
    if small is not None:
        return dict(small), None
    import datasets

    saved = any((path / mark).is_file() for mark in _SAVED)
    if config is not None and (saved or path.is_file()):
        raise DataNotFoundError(f"'{name}' has no configurations", "leave --config out")
    if path.is_file() and path.suffix not in _FORMATS:
        raise DataNotFoundError(
            f"'{name}' is a file, and none of: {', '.join(_FORMATS)}",
            "name such a file, or a folder of images or of them",
        )
    with readable(name):
        used = None
        if path.is_file():
            _require_sound(_FORMATS[path.suffix], [path])
            loaded = datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), cache_dir=_cache_of(path))
        elif saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            metadata = read_metadata(path)  # refuse a card that `datasets` would never finish reading
            builder = _builder(path.resolve(), name, config, _cache_of(path))
            used = builder.config.name
            files = {str(split): list(map(Path, some)) for split, some in builder.config.data_files.items()}
            loaded = _prepared(builder, files, path.resolve(), bool(metadata.get("configs")))
    return _splits_of(loaded, name), named_config(used)


def _prepared(builder: Any, files: Mapping[str, Sequence[Path]], root: Path, declared: bool) -> Any:
    """Return all splits that a builder makes of these files; `declared` says that a card has named them."""
    every = [file for some in files.values() for file in some]
    columns = max(len(builder.info.features or ()), len(getattr(builder.config, "names", None) or ()))
    _require_sound(builder.name, every, columns)
    if builder.name == "imagefolder" and any(file.suffix.lower() == ".zip" and has_images(file) for file in every):
        options = {key: getattr(builder.config, key) for key in ("drop_labels", "drop_metadata")}
        return _without_split_labels(open_zipped(files, root, declared, options, _cache()))
    builder.download_and_prepare()
    return _without_split_labels(builder.as_dataset())


def _require_sound(reader: str, files: Iterable[Path], columns: int = 0) -> None:
    """Raise ValueError for texts that crash their reader, or that it would never finish."""
    checks = {"json": require_sound_json, "csv": require_sound_csv}
    for file in files:
        if (reader in checks or file.suffix.lower() in (".zip", *_FORMATS)) and file.is_file():
            for name, _, stream in unpacked(file):
                # beside images, tables hold their other columns
                kind = reader if reader in checks else _FORMATS.get(PurePosixPath(name).suffix, "")
                if kind in checks:
                    checks[kind](name, stream, columns)


def _splits_of(loaded: Any, name: str) -> dict[str, Any]:
    import datasets

    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    if not splits:
        raise DataNotFoundError(f"'{name}' has no rows", "name a file or folder that has some")
    return {str(split): with_images(rows) for split, rows in splits.items()}


def _without_split_labels(splits: Any) -> Any:
    """Remove labels that `datasets` inferred from folders named train and test.

    Recognised by as many classes as splits, and at most one class in each split, which no other has.
    """
    import datasets

    declared = next(iter(splits.values())).features.get("label")
    if len(splits) < 2 or not isinstance(declared, datasets.ClassLabel) or declared.num_classes != len(splits):
        return splits
    labels = [set(rows["label"]) - {None} for rows in splits.values()]
    disjoint = len(set.union(*labels)) == sum(len(some) for some in labels)
    return splits.remove_columns("label") if disjoint and all(len(some) <= 1 for some in labels) else splits


def open_whole(repo: HubRepo, config: str | None, limit: int) -> OpenedData:
    """Fetch a repo through the cache, without scripts and pickles, and open it as a folder."""
    data = _data_files(repo)
    names = [*(name for name in METADATA_FILES if name in repo.files), *data]
    size = repo.to_download(names)
    if size > limit:
        raise DownloadTooLargeError(
            f"'{repo.id}' can only be read whole, a download of {size_text(size)}; {size_text(limit)} are allowed",
            f"allow more with --max-download, or use the Hub's parquet copy: --data {repo.id}@{CONVERTED}",
        )
    _require_all_shards(repo, data)
    if not _SAVED.isdisjoint(data):
        raise DataNotFoundError(
            f"'{repo.id}' was written by save_to_disk, which may name files elsewhere",
            "use one in parquet",
        )
    folder = fetch(repo, names)
    converted = _converted_files(repo, data, config)
    try:
        with readable(repo.id):
            if converted is not None:
                found = _FoundFiles("parquet", converted.config or "default", converted.splits)
            else:
                found = _find_files(repo.id, data, folder, config)
            return _splits_of(_open_found(repo, folder, found, limit), repo.id), named_config(found.config)
    except DataNotFoundError as error:
        if error.__cause__ is not None and _scripts(repo):
            raise _no_data(repo) from error
        raise


@dataclass(frozen=True)
class _FoundFiles:
    """The files of one configuration by split, and how to read them."""

    reader: str
    """The builder of `datasets`."""
    config: str
    splits: Mapping[str, Sequence[str]]
    features: Any = None
    sizes: Any = None
    """The rows of each split, if the card declares them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    declared: bool = False
    """True if the card names the files of each split."""


def _open_found(repo: HubRepo, folder: Path, found: _FoundFiles, limit: int) -> Any:
    """Open the files of a stranger's data set, after a look at what they unpack to."""
    import datasets

    names = [name for some in found.splits.values() for name in some]
    size = UnpackedSize(repo.id, sum(repo.files[name] for name in names), limit)
    for name in names:
        if found.reader != "imagefolder" or PurePosixPath(name).suffix.lower() in (".zip", *_FORMATS):
            size.add_file(folder / name, found.reader)
    files = {split: [folder / name for name in some] for split, some in found.splits.items()}
    data_files = {
        split: datasets.data_files.DataFilesList(list(map(str, some)), [(repo.commit,)] * len(some))
        for split, some in files.items()
    }
    options = {"name": found.config, "data_files": data_files, **found.options}
    builder = datasets.load_dataset_builder(found.reader, cache_dir=_cache(), **options)
    builder.info.features = found.features or builder.info.features
    builder.info.splits = builder.info.splits or found.sizes
    return _prepared(builder, files, folder, found.declared)


def _find_files(name: str, names: Sequence[str], source: Path, config: str | None) -> _FoundFiles:
    """Return the files that `datasets` finds by their names and by what was checked of the card in `source`.

    It sees a folder of empty files, but for archives: unlike its own view of the Hub, that needs no network, is pinned
    to one commit, and holds nothing that a pattern could find beside the repo's own files.
    """
    declared = read_declared(source, name, config)
    with tempfile.TemporaryDirectory(prefix="hf-bico-") as scratch:
        folder = Path(scratch).resolve() / "repo"
        placed = {file: file for file in names}
        patterns: dict[str, str] = {}
        if declared.splits:
            matched = {split: matching(names, some) for split, some in declared.splits.items()}
            patterns = {split: f"{number}/**" for number, split in enumerate(matched)}
            placed = {f"{number}/{file}": file for number, some in enumerate(matched.values()) for file in some}
        for place, file in placed.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            if file.lower().endswith(".zip") and (source / file).is_file():
                (folder / place).symlink_to((source / file).resolve())
            else:
                (folder / place).touch()
        declared.write_card(folder, patterns)
        card = declared.config if patterns or declared.folder else None
        builder = _builder(folder, name, card, str(Path(scratch) / "cache"))
        if builder.name not in _FOREIGN_FORMATS:
            raise ValueError(f"files of the format '{builder.name}' are only read from a folder of your own")
        splits = {
            str(split): [placed[Path(str(file)).relative_to(folder).as_posix()] for file in files]
            for split, files in builder.config.data_files.items()
        }
        config_type = type(builder.config)
        given = {one.name: getattr(builder.config, one.name) for one in fields(config_type)}
        options = {key: value for key, value in given.items() if value != getattr(config_type, key, None)}
        options |= {key: value for key, value in declared.options.items() if hasattr(config_type, key)}
        options = {key: value for key, value in options.items() if key not in _OWN_FIELDS}
        read = (builder.name, declared.config, splits, declared.features, declared.sizes)
        return _FoundFiles(*read, options, bool(declared.splits))


def large_parquet(repo: HubRepo, config: str | None) -> ParquetFiles | None:
    """Return the parquet files of a repo that is too large to fetch whole; None for small ones and other formats."""
    data = _data_files(repo)
    # beside images, a metadata.parquet holds their other columns
    names = [name for name in data if name.endswith(".parquet") and PurePosixPath(name).name != "metadata.parquet"]
    size, parquet = (sum(repo.files[name] for name in some) for some in (data, names))
    if size <= SMALL_REPO or parquet < size / 2:
        return None
    _require_all_shards(repo, names)
    return _converted_files(repo, data, config) or _declared_files(repo, names, config)


def _declared_files(repo: HubRepo, names: Sequence[str], config: str | None) -> ParquetFiles | None:
    """Return the files that `datasets` finds by their names and the card."""
    source = fetch(repo, [name for name in METADATA_FILES if name in repo.files])
    with readable(repo.id):
        try:
            found = _find_files(repo.id, names, source, config)
        except FileNotFoundError:
            return None  # the card names files of another format
        return ParquetFiles(repo, named_config(found.config), found.splits, found.features)


def _converted_files(repo: HubRepo, names: Sequence[str], config: str | None) -> ParquetFiles | None:
    """Return files laid out as in the Hub's parquet copies: CONFIGURATION/SPLIT/NUMBER.parquet."""
    configs: dict[str, dict[str, list[str]]] = {}
    for name in names:
        match = _CONVERTED_FILE.fullmatch(name)
        if match is None:
            return None
        configs.setdefault(match["config"], {}).setdefault(match["split"], []).append(name)
    config = choose_config(repo.id, list(configs), config)
    return ParquetFiles(repo, named_config(config), configs[config])


def _cache() -> str | None:
    """Return the folder for `datasets` to write into: None for its own, or a temporary one if that is not writable."""
    import datasets

    return _writable_cache(str(datasets.config.HF_DATASETS_CACHE))


@cache
def _writable_cache(own: str) -> str | None:
    try:
        os.makedirs(own, exist_ok=True)
        tempfile.TemporaryFile(dir=own).close()
    except OSError:
        folder = tempfile.mkdtemp(prefix="hf-bico-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # what is read stays mapped into memory until then
        return folder
    return None


def _cache_of(path: Path) -> str:
    """Return the folder for `datasets` to write what it makes of a local folder or file in its present state.

    By itself it takes a file for the same if path and time of change are: a copy, an archive or a clock that was set
    back can keep that time.
    """
    import datasets

    digest = hashlib.sha256()
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    for file in sorted(files):
        status = file.stat()
        facts = (str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(repr(facts).encode())
    return str(Path(_cache() or datasets.config.HF_DATASETS_CACHE) / "hf-bico" / digest.hexdigest()[:32])


def _builder(folder: Path, name: str, config: str | None, cache: str | None) -> Any:
    import datasets

    try:
        with _quiet_hub():  # no warning about a card without metadata
            return datasets.load_dataset_builder(str(folder), config, cache_dir=cache)
    except ValueError:
        choose_config(name, datasets.get_dataset_config_names(str(folder)), config)
        raise


def named_config(config: str | None) -> str | None:
    """Return the configuration's name, None for the default."""
    return None if config == "default" else config


def _data_files(repo: HubRepo) -> list[str]:
    """Return the names of the files that may hold data; refuse a repo without any."""
    visible = [name for name in repo.files if "/." not in f"/{name}" and PurePosixPath(name).suffix]
    names = [name for name in visible if name not in METADATA_FILES and not name.lower().endswith(_NOT_DATA)]
    if not names:
        raise _no_data(repo)
    return names


def _scripts(repo: HubRepo) -> list[str]:
    return [name for name in repo.files if name.endswith(".py") and "/" not in name]


def _no_data(repo: HubRepo) -> DataNotFoundError | NotCachedError:
    if is_offline():
        return _not_cached(repo)
    if scripts := _scripts(repo):
        return DataNotFoundError(
            f"'{repo.id}' is a script, '{scripts[0]}': reading it runs code, which is not done",
            f"use the Hub's parquet copy of it: --data {repo.id}@{CONVERTED}",
        )
    return DataNotFoundError(f"'{repo.id}' has no data files", "name a data set of parquet files or folders of images")


def _not_cached(repo: HubRepo) -> NotCachedError:
    return NotCachedError(
        f"'{repo.id}' is not completely in the cache, and offline mode is on (HF_HUB_OFFLINE)",
        f"unset HF_HUB_OFFLINE, or download it once: hf download {repo.id} --repo-type dataset",
    )


def _require_all_shards(repo: HubRepo, names: Sequence[str]) -> None:
    """Refuse an incomplete cache: offline, missing shards would silently give another data set."""
    if not is_offline():
        return
    shards = Counter((match["stem"], int(match["count"])) for name in names if (match := _SHARD.fullmatch(name)))
    if any(cached != count for (_, count), cached in shards.items()):
        raise _not_cached(repo)


def with_images(rows: Any) -> Any:
    """Return rows in which {bytes, path} columns are images."""
    for name, feature in image_features(rows.features).items():
        if feature != rows.features[name]:
            rows = rows.cast_column(name, feature)
    return rows


def image_features(features: Any) -> Any:
    """Return features in which {bytes, path} columns are images, as the Hub shows them."""
    import datasets

    images = [name for name, one in features.items() if isinstance(one, dict) and set(one) == {"bytes", "path"}]
    return datasets.Features({**features, **{name: datasets.Image() for name in images}})


def decode_image(value: Any, folder: Path) -> Any:
    """Decode an image of a Hub data set from bytes or a file of the repo; refuse any other path or address."""
    import datasets
    from PIL import Image

    if not isinstance(value, dict):
        return value
    source: Any = None if value.get("bytes") is None else io.BytesIO(value["bytes"])
    if source is None:
        source = file_within(value.get("path"), folder)
        if source is None:
            raise ValueError("it is not in the data set, but somewhere else")
    with Image.open(source) as image:
        if image.format == "EPS":
            raise ValueError("it is a program in PostScript, which Ghostscript would run")
    return datasets.Image().decode_example(value)


def file_within(path: Any, folder: Path) -> Path | None:
    """Return the path of a file that a data set names, if it leads into the folder."""
    file = Path(os.path.normpath(str(path)))
    return file if any(file.is_relative_to(parent) for parent in (folder, folder.resolve())) else None


def fetch(repo: HubRepo, names: Sequence[str]) -> Path:
    """Fetch files into the cache, several at a time; return their folder."""
    in_parallel(lambda name: repo.fetch([name]), [name for name in names if repo.cached(name) is None])
    repo.hub.remember(repo)
    return repo.snapshot


def in_parallel(call: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Return the results in order; calls that wait for the network run at the same time."""
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return list(pool.map(call, items))


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise our error for what `datasets` and pyarrow raise over a data set."""
    import datasets
    import pyarrow
    import yaml

    format_errors = (pyarrow.ArrowException, yaml.YAMLError, *UNPACKING_ERRORS)
    try:
        with _quiet_datasets(), no_progress_bars():
            yield
    except (datasets.exceptions.DatasetsError, *READ_ERRORS, *format_errors) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        _require_own_cache(cause or error)
        reason = str(cause or error).splitlines()[0] if str(cause or error) else type(error).__name__
        raise DataNotFoundError(
            f"'{name}' cannot be read as a data set: {reason}",
            "give a folder with one sub-folder of images a class, or parquet, JSON or CSV files",
        ) from error


def _require_own_cache(error: BaseException) -> None:
    """Raise another error for one that is of the cache, and not of the data: it may hold folders of another user."""
    import datasets

    file = error.filename if isinstance(error, OSError) else None
    if isinstance(file, str) and Path(file).is_relative_to(datasets.config.HF_DATASETS_CACHE):
        raise OutputError(
            f"'{file}' of the cache cannot be used: {error.strerror}",  # type: ignore[attr-defined]
            "set HF_HOME to another folder",
        ) from error


def _quiet(logging: Any) -> Iterator[None]:
    """Silence a library's log: we report its failures ourselves."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@changed_together
@contextmanager
def _quiet_datasets() -> Iterator[None]:
    from datasets import logging

    yield from _quiet(logging)


@changed_together
@contextmanager
def _quiet_hub() -> Iterator[None]:
    from huggingface_hub.utils import logging

    yield from _quiet(logging)


@changed_together
@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of `datasets` inside."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
