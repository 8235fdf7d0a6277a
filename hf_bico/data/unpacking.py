"""Say what packed data files unpack to, before anything else reads them: archives, compressed texts, parquet, Arrow.

Goes by what is in a file, as its readers do, not by its name. Knows formats and bytes; not what rows mean.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from hf_bico.errors import DownloadTooLargeError
from hf_bico.utils.text import size_text

FREE_UNPACKED = 256_000_000
"""Bytes that a download may always unpack to, however small `--max-download` is."""
MAX_RATIO = 100
"""Texts are packed to a tenth or a thirtieth."""
MAX_MEMBERS = 500_000
UNPACKING_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, NotImplementedError)
"""Errors of archives that are neither OSError nor ValueError."""
_CHUNK = 2**20
_MAX_NESTING = 3
"""Archives in archives: readers open one inside of another, and no more."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
"""Bytes of one decoded value, at most, by parquet's types."""
_NESTED_ROWS, _FLAT_ROWS, _BATCH = 16, 2**16, 2**26
"""Rows that are decoded before they are counted, and about how many bytes."""
_COMPRESSIONS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda stream: _arrow_stream(stream, "zstd"),
    b"\x04\x22\x4d\x18": lambda stream: _arrow_stream(stream, "lz4"),
}
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_ARROW = b"ARROW1"
_UNSUPPORTED = (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07")


class UnpackedSize:
    """Counts what a data set of this name unpacks to, and raises as soon as that is more than allowed.

    Allowed is `limit`, within a hundred times the `packed` size, and 256 MB in any case.
    """

    def __init__(self, name: str, packed: int, limit: int) -> None:
        self._name, self._packed, self._limit = name, packed, limit
        self.allowed = max(FREE_UNPACKED, min(limit, MAX_RATIO * packed))
        self.total = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        """Count bytes that were unpacked."""
        with self._lock:
            self.total += size
        self.require(self.total)

    def require(self, size: int) -> None:
        """Raise if so many bytes in all are more than allowed."""
        if size > self.allowed:
            raise DownloadTooLargeError(
                f"'{self._name}' has {size_text(self._packed)} and unpacks to {size_text(size)} or more; "
                f"{size_text(self.allowed)} are allowed",
                "allow more with --max-download"
                if self.allowed == self._limit
                else "use another data set, or unpack it into a folder yourself and name that",
            )

    def add_file(self, file: Path, reader: str) -> None:
        """Count what a file unpacks to for this builder of `datasets`; parquet and Arrow are texts to others."""
        if reader == "parquet" or file.suffix == ".parquet":
            import pyarrow.parquet

            footer = pyarrow.parquet.read_metadata(file)
            self.require(self.total + sum(group_size(footer, group) for group in range(footer.num_row_groups)))
            for group in range(footer.num_row_groups):
                read_row_group(footer, group, lambda: file.open("rb"), self, keep=False)
        elif reader == "arrow":
            for batch in _arrow_batches(file):
                self.add(sum(map(_array_size, batch.columns)))
        else:
            for _, size, member in unpacked(file):
                for count in [size] if size is not None else _lengths(member):
                    self.add(count)


def group_size(footer: Any, group: int, columns: Sequence[str] | None = None) -> int:
    """Return the bytes that a row group decodes to by the footer; a dictionary of texts may still multiply them."""
    starts = None if columns is None else tuple(f"{name}." for name in columns)
    leaves = [(footer.row_group(group).column(leaf), footer.schema.column(leaf)) for leaf in range(footer.num_columns)]
    return sum(
        max(chunk.total_uncompressed_size, chunk.num_values * _width(leaf))
        for chunk, leaf in leaves
        if starts is None or f"{leaf.path}.".startswith(starts)
    )


def _width(leaf: Any) -> int:
    """Return the bytes of one decoded value of a parquet column; 1 for a text of any length."""
    return _WIDTHS.get(leaf.physical_type) or max(leaf.length, 1)


def read_row_group(
    footer: Any,
    group: int,
    opened: Callable[[], Any],
    size: UnpackedSize,
    columns: Sequence[str] | None = None,
    keep: bool = True,
) -> list[Any]:
    """Decode a row group of a parquet file batch by batch, each counted before the next; return what is to `keep`.

    One long text in a dictionary may stand for a million rows: texts stay dictionaries, whose size is known without
    decoding them. Where pyarrow cannot do that, in nested columns, only a few rows are decoded at a time.
    """
    import pyarrow

    leaves = [footer.schema.column(leaf) for leaf in range(footer.num_columns)]
    texts = [leaf for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    flat = [leaf.path for leaf in texts if leaf.path == leaf.name]
    lists = [leaf.path for leaf in texts if leaf.max_repetition_level > 0]
    whole = footer.row_group(group)
    rows = max(_NESTED_ROWS, min(_FLAT_ROWS, _BATCH * whole.num_rows // max(whole.total_byte_size, 1)))
    rows = rows if len(flat) == len(texts) else _NESTED_ROWS
    try:
        return _decoded(footer, group, opened, size, columns, keep, [*flat, *lists], rows)
    except pyarrow.ArrowNotImplementedError:
        return _decoded(footer, group, opened, size, columns, keep, flat, rows)


def _decoded(
    footer: Any,
    group: int,
    opened: Callable[[], Any],
    size: UnpackedSize,
    columns: Sequence[str] | None,
    keep: bool,
    dictionaries: Sequence[str],
    rows: int,
) -> list[Any]:
    import pyarrow.parquet

    kept, counted = [], 0
    with opened() as source:
        # one request: the footer is known, and the chunks of a column lie side by side
        file = pyarrow.parquet.ParquetFile(source, metadata=footer, pre_buffer=True, read_dictionary=list(dictionaries))
        wanted = None if columns is None else list(columns)
        for batch in file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False):
            counted += sum(map(_array_size, batch.columns))
            size.require(size.total + counted)
            kept += [batch] if keep else []
    size.add(counted)
    return kept


def _array_size(array: Any) -> int:
    """Return the bytes of an Arrow array, with its dictionaries written out."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return int(pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0) + 4 * len(array)
    if pyarrow.types.is_struct(kind):
        return sum(map(_array_size, array.flatten()))
    if pyarrow.types.is_map(kind):
        return _array_size(array.keys) + _array_size(array.items) + 4 * len(array)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _array_size(array.flatten()) + 4 * len(array)
    return int(array.nbytes)


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        if source.read(len(_ARROW)) == _ARROW:
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)


def unpacked(file: Path) -> Iterator[tuple[str, int | None, Any]]:
    """Yield the name, the size if it is known, and the open content of each file that a file unpacks to."""
    with file.open("rb") as stream:
        yield from _unpacked(file.name, file.stat().st_size, stream, 0)


def _unpacked(name: str, size: int, stream: Any, nesting: int) -> Iterator[tuple[str, int | None, Any]]:
    head = stream.read(6)
    is_zip = head.startswith(_ZIP) or (nesting == 0 and zipfile.is_zipfile(stream))  # something may stand before it
    stream.seek(0)
    if head.startswith(_UNSUPPORTED):
        raise ValueError(f"'{name}' is a 7z or rar archive")
    unpack = next((unpack for magic, unpack in _COMPRESSIONS.items() if head.startswith(magic)), None)
    if nesting == _MAX_NESTING:
        yield name, size, stream
    elif is_zip:
        yield from _zipped(name, stream, nesting)
    elif unpack is not None:
        yield name.rpartition(".")[0] or name, None, unpack(stream)  # counted before it is looked into
        stream.seek(0)
        yield from _archived(name, unpack(stream), nesting)
    else:
        yield name, size, stream
        stream.seek(0)
        yield from _archived(name, stream, nesting)


def _zipped(name: str, stream: Any, nesting: int) -> Iterator[tuple[str, int | None, Any]]:
    try:
        archive = zipfile.ZipFile(stream)
        members = [info for info in archive.infolist() if not info.is_dir()]
        _require_few(name, len(members))
        for info in members:
            with archive.open(info) as member:  # never gives more than `file_size` bytes
                yield from _unpacked(info.filename, info.file_size, member, nesting + 1)
    except RuntimeError as error:  # encrypted, or compressed in an unknown way
        raise ValueError(f"'{name}' cannot be unpacked: {error}") from error


def _archived(name: str, stream: Any, nesting: int) -> Iterator[tuple[str, int | None, Any]]:
    """Yield what the members of a tar archive unpack to; their own bytes are counted already."""
    try:
        archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  it is read from where the caller reads on
    except tarfile.ReadError:
        return
    for number, info in enumerate(archive):
        _require_few(name, number)
        if info.issparse():
            raise ValueError(f"'{name}' has a sparse file, '{info.name}'")
        member = archive.extractfile(info) if info.isreg() else None
        if member is not None:
            yield from ((inner, size and 0, one) for inner, size, one in _unpacked(info.name, 0, member, nesting + 1))


def _require_few(name: str, members: int) -> None:
    if members > MAX_MEMBERS:
        raise ValueError(f"'{name}' holds more than {MAX_MEMBERS:,} files")


def _arrow_stream(stream: Any, compression: str) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), compression)


def _lengths(stream: Any) -> Iterator[int]:
    while chunk := stream.read(_CHUNK):
        yield len(chunk)
