"""Data sets of strangers: their cards lead nowhere, and what they unpack to is known before it is unpacked."""

from __future__ import annotations

import bz2
import gzip
import http.server
import io
import json
import lzma
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hf_bico.data import dataset, loading, unpacking
from hf_bico.data.columns import Columns
from hf_bico.data.dataset import Samples
from hf_bico.data.declarations import matching
from hf_bico.data.draw import draw, open_data
from hf_bico.errors import (
    DataNotFoundError,
    DownloadTooLargeError,
    MemoryExhaustedError,
    UnreadableSampleError,
)
from hf_bico.hub.repo_metadata import read_metadata
from hf_bico.settings import Settings
from support.bounds import within
from support.hub import Hub

ROWS = pa.table({"text": [f"text {row}" for row in range(40)], "label": [0, 1] * 20})
BOTH = pytest.mark.parametrize("small", [0, 10**9], ids=["in-parts", "whole"])


def parquet(rows: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, **options)
    return out.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `datasets`, empty."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "datasets"


@pytest.fixture
def requests() -> Iterator[list[str]]:
    """What somebody asks a server of, whose address is the first entry."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    seen.append(f"127.0.0.1:{server.server_port}")
    yield seen
    server.shutdown()
    server.server_close()


def publish(hub: Hub, files: dict[str, bytes | str]) -> None:
    hub.create("user/x", type="dataset").commit(files)


def texts(settings: Settings | None = None, **options: Any) -> Any:
    return draw("user/x", settings or Settings(n=4, evaluate=False, **options), reads="texts")


OUTSIDE = (
    "data_files: 'http://{host}/x.csv'",
    "data_files: ['train.parquet', 'https://{host}/x.csv']",
    "data_files: [{{split: train, path: 'http://{host}/x.csv'}}]",
    "data_files: [{{split: train, path: ['train.parquet', 'http://{host}/*.csv']}}]",
    "data_files: 'zip://x.csv::http://{host}/x.zip'",
    "data_files: 'gzip://x.csv::http://{host}/x.csv.gz'",
    "data_files: 'simplecache::http://{host}/x.csv'",
    "data_files: 'ftp://{host}/x.csv'",
    "data_files: 'hf://datasets/user/other/x.csv'",
    "data_files: 'file:///etc/*.csv'",
    "data_files: '/**/*.csv'",
    "data_files: /etc/passwd",
    "data_files: '../**/*.csv'",
    "data_files: 'data/../../*.csv'",
    "data_files: '~/x.csv'",
    "data_files: 'C:/x.csv'",
    "data_files: '..\\x.csv'",
    "data_dir: 'http://{host}/d'",
    "data_dir: ../../..",
    "data_dir: /",
    "data_dir: '~'",
)


@BOTH
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_card_leads_nowhere(
    hub: Hub, requests: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, small: int, file: str
) -> None:
    """No address is asked, and nothing of this machine is looked through, which would take minutes."""
    monkeypatch.setattr(loading, "SMALL_REPO", small)
    for number, line in enumerate(OUTSIDE):
        head = f"configs:\n- config_name: default\n  {line.format(host=requests[0])}\n"
        card = f"---\n{head}---\n" if file == "README.md" else head
        hub.create(f"user/x{number}", type="dataset").commit({file: card, "train.parquet": parquet(ROWS)})
        with pytest.raises(DataNotFoundError, match="names a file outside of the repo"), within(10):
            draw(f"user/x{number}", Settings(n=4, evaluate=False), reads="texts")
    assert len(requests) == 1
    assert not cache.exists()


NUMBERED = "dataset_info:\n  features:\n  - {name: label, dtype: {class_label: {names: {'0': a, '%d': b}}}}\n"
CONFIGS = "configs:\n- {{config_name: default, data_files: {}}}\n"
UNSUPPORTED = (
    "configs:\n- {config_name: default, data_files: t.csv, sep: '(a+)+$'}\n",
    "configs:\n- {config_name: default, data_files: t.csv, encoding: punycode}\n",
    "configs:\n- {config_name: default, data_files: t.csv, filters: [[label, in, [0]]]}\n",
    "configs:\n- {config_name: '..', data_files: t.csv}\n",
    "configs:\n- {data_files: t.csv}\n",
    "configs: {config_name: default}\n",
    "configs: [5]\n",
    CONFIGS.format("5"),
    CONFIGS.format("[[t.csv]]"),
    CONFIGS.format("{train: t.csv}"),
    CONFIGS.format("[{split: train}]"),
    CONFIGS.format("[{split: 5, path: t.csv}]"),
    CONFIGS.format("[" + "t.csv, " * 10_001 + "]"),
    CONFIGS.format("none.csv"),
    CONFIGS.format("[{split: train, path: t.csv}, {split: test, path: 'test*'}]"),
    CONFIGS.format("[{split: train, path: t.csv}, {split: train, path: t.csv}]"),
    CONFIGS.format("t.csv, skiprows: 2000000000"),
    NUMBERED % 900_000_000,
    CONFIGS.format(f"t.csv, header: null, names: [{', '.join(f'c{n}' for n in range(50_000))}]"),
)


@pytest.mark.parametrize("line", UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_a_card_that_declares_nonsense_is_refused_at_once(hub: Hub, line: str) -> None:
    publish(hub, {".huggingface.yaml": line, "t.csv": "text,label\na,0\nb,1\n" * 999})
    with pytest.raises(DataNotFoundError) as caught, within(10):
        texts()
    assert "\n" not in caught.value.cause


def test_steps_of_reading_are_not_for_the_card_to_say(hub: Hub) -> None:
    """In chunks of one line, 40,000 lines would take minutes."""
    lines = "".join(f"text {row},{row % 2}\n" for row in range(40_000))
    options = "chunksize: 1, engine: python, converters: null, batch_size: 1"
    publish(hub, {"README.md": f"---\n{CONFIGS.format(f't.csv, {options}')}---\n", "t.csv": f"text,label\n{lines}"})
    with within(10):
        assert len(texts().data.splits["train"]) == 40_000


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("**/" * 12 + "*.csv", "/".join("a" * 20) + "/x.txt"), ("a*" * 8 + "b.csv", f"{'a' * 200}.csv")],
)
def test_a_pattern_takes_no_time(hub: Hub, pattern: str, name: str) -> None:
    publish(hub, {"README.md": f"---\n{CONFIGS.format(repr(pattern))}---\n", name: "text,label\na,0\n"})
    with pytest.raises(DataNotFoundError), within(10):
        texts()


def test_patterns_match_as_those_of_datasets(tmp_path: Path) -> None:
    from datasets.data_files import resolve_pattern

    names = ["a.csv", "b.txt", "data/a.csv", "data/train-1.csv", "data/x/train-2.csv", "data/x/y/a.csv", "e/[1].csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in ("*", "**", "*.csv", "**/*.csv", "data/*", "data/**", "data/**/*.csv", "**/a.csv", "data/*/*.csv"):
        expected = sorted(
            Path(file).relative_to(tmp_path).as_posix() for file in resolve_pattern(pattern, str(tmp_path))
        )
        assert sorted(matching(names, [pattern])) == expected, pattern
    for pattern in ("**/train-*", "data/x/**", "[ab].*", "data/train-[0-9].csv", "data/?.csv", "**/x/**", "./a.csv"):
        expected = sorted(
            Path(file).relative_to(tmp_path).as_posix() for file in resolve_pattern(pattern, str(tmp_path))
        )
        assert sorted(matching(names, [pattern])) == expected, pattern


TABLE = "".join(f"text {row}\t{row % 2}\n" for row in range(8))
FEATURES = "[{name: text, dtype: string}, {name: label, dtype: {class_label: {names: {'0': bad, '1': good}}}}]"


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({"README.md": CONFIGS.format("'d/*.parquet'"), "d/a [1].parquet": parquet(ROWS)}, None, {"train": 40}),
        (
            {
                "README.md": CONFIGS.format(
                    "[{split: train, path: [a.parquet, 'b*']}, {split: test, path: c.parquet}]"
                ),
                **{f"{name}.parquet": parquet(ROWS) for name in "abc"},
            },
            None,
            {"train": 80, "test": 40},
        ),
        (
            {
                "README.md": "configs: [{config_name: a, data_dir: a}, {config_name: b, data_dir: b, default: true}]\n",
                "a/train.parquet": parquet(ROWS),
                "b/train.parquet": parquet(ROWS.slice(0, 8)),
            },
            None,
            {"train": 8},
        ),
        (
            {
                ".huggingface.yaml": "configs: [{config_name: a}, {config_name: b, data_files: 'b/**'}]",
                "README.md": CONFIGS.format("nowhere.parquet"),
                "a/x/y.parquet": parquet(ROWS),
                "b/y/z.parquet": parquet(ROWS.slice(0, 8)),
            },
            "b",
            {"train": 8},
        ),
    ],
    ids=["glob", "splits", "folders", "standalone"],
)
@BOTH
def test_what_a_card_declares_is_followed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, small: int, files: dict[str, Any], config: str | None, expected: Any
) -> None:
    monkeypatch.setattr(loading, "SMALL_REPO", small)
    files |= {"README.md": f"---\n{files['README.md']}---\n"}
    publish(hub, files)
    data = open_data("user/x", Settings(n=8, config=config, evaluate="test" in expected), reads="texts")
    sizes = {split: len(rows) for split, rows in data.splits.items()}
    assert sizes == expected


def test_how_to_read_a_table_is_for_the_card_to_say(hub: Hub) -> None:
    line = 'config_name: default, data_files: t.txt, sep: "\\t", names: [text, label], header: null'
    card = f"---\nconfigs:\n- {{{line.replace('t.txt', 't.csv')}}}\ndataset_info:\n  features: {FEATURES}\n---\n"
    publish(hub, {"README.md": card, "t.csv": TABLE})
    drawn = texts()
    assert drawn.data.class_names == ("bad", "good")
    assert len(drawn.data.splits["train"]) == 8
    assert {item.first for items, _ in drawn.samples.batches(4) for item in items} <= {f"text {n}" for n in range(8)}


def test_a_list_of_a_declared_length_takes_no_room_where_it_is_missing(hub: Hub) -> None:
    features = FEATURES.replace("]", ", {name: more, list: int64, length: 100000000}]")
    publish(hub, {"README.md": f"---\ndataset_info:\n  features: {features}\n---\n", "train.jsonl": JSON_ROWS})
    assert texts().data.splits["train"]["more"][:2] == [None, None]


JSON_ROWS = '{"text": "a", "label": 1}\n' * 8


def test_class_names_of_older_data_sets(hub: Hub) -> None:
    names = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": ["bad", "good"], "_type": "ClassLabel"}}
    infos = {"user--x": {"features": names, "splits": {}}}
    publish(hub, {"dataset_infos.json": json.dumps(infos), "train.jsonl": JSON_ROWS})
    assert texts().data.class_names == ("bad", "good")


MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60))]) + "\n"
LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]) + "\n"
COPIES = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 5000)}]\n"
BOMBS = {
    "merges": MERGES,
    "laughs": LAUGHS,
    "laughs-in-features": LAUGHS + "dataset_info: {features: *a29}\n",
    "copies": COPIES,
    "deep": "a: " + "[" * 1_000 + "\n",
    "itself": "configs: &a [*a]\n",
    "itself-anew": "b: &a x\nconfigs: &a [*a]\n",
    "megabytes": "a: b\n" * 1_000_000,
}


@BOTH
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_that_expands_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, small: int, file: str, bomb: str
) -> None:
    monkeypatch.setattr(loading, "SMALL_REPO", small)
    text = f"---\n{BOMBS[bomb]}---\n" if file == "README.md" else BOMBS[bomb]
    publish(hub, {file: text, "train.parquet": parquet(ROWS)})
    with pytest.raises(DataNotFoundError, match="cannot be read as a data set"), within(10):
        texts()


@pytest.mark.parametrize("bomb", ["merges", "laughs", "copies"])
def test_yaml_that_expands_is_refused_in_a_folder_too(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_bytes(parquet(ROWS))
    (tmp_path / "data" / ".huggingface.yaml").write_text(BOMBS[bomb])
    with pytest.raises(DataNotFoundError), within(10):
        draw(str(tmp_path / "data"), Settings(n=4), reads="texts")


@pytest.mark.parametrize("bomb", ["merges", "laughs", "copies", "itself", "itself-anew"])
def test_a_model_card_that_expands_is_not_read(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "README.md").write_text(f"---\nbase_model: org/base\n{BOMBS[bomb]}---\n")
    found = read_metadata(tmp_path)
    assert found.bases == ()
    assert "its metadata are not YAML" in (found.problem or "")


def test_anchors_of_an_honest_card(hub: Hub) -> None:
    """As yaml writes them itself, where one list of columns stands in many places."""
    infos = [f"- config_name: c{n}\n  features: {f'&id001 {FEATURES}' if n == 0 else '*id001'}\n" for n in range(300)]
    configs = [f"- config_name: c{n}\n  data_files: [{{split: train, path: t.csv}}]\n" for n in range(300)]
    card = f"---\nconfigs:\n{''.join(configs)}dataset_info:\n{''.join(infos)}---\n"
    publish(hub, {"README.md": card, "t.csv": "text,label\n" + TABLE.replace("\t", ",")})
    with within(10):
        assert texts(config="c299").data.class_names == ("bad", "good")


def bomb(rows: int = 200_000, length: int = 3185) -> Any:
    """A column of one long text, once in its dictionary."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * length]))
    return pa.table({"text": column, "label": pa.array([0, 1] * (rows // 2))})


@BOTH
@pytest.mark.parametrize("kind", ["dictionary", "plain", "listed"])
def test_parquet_that_unpacks_to_hundreds_of_megabytes(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, small: int, kind: str
) -> None:
    monkeypatch.setattr(loading, "SMALL_REPO", small)
    content = {
        "dictionary": lambda: parquet(bomb()),
        "plain": lambda: parquet(bomb(100_000, 6370).cast(pa.schema({"text": "string", "label": "int64"})), **PLAIN),
        "listed": lambda: parquet(pa.table({"messages": listed(2_000_000, 318)})),
    }[kind]()
    assert len(content) < 100_000
    publish(hub, {"train.parquet": content})
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(
        DownloadTooLargeError, match=r"has [\d.]+ kB and unpacks to [\d.]+ MB or more; 256 MB"
    ) as caught:
        texts(Settings(n=1, evaluate=False))
    assert "folder yourself" in caught.value.remedy
    assert not cache.exists() or not list(cache.rglob("*.arrow"))
    if kind != "plain":
        assert pa.default_memory_pool().max_memory() - before < 200_000_000, "nothing was unpacked to know it"


PLAIN = {"use_dictionary": False, "compression": "zstd"}


def listed(count: int, length: int) -> Any:
    """One chat of so many messages, all alike."""
    offsets = pa.array([0, count], pa.int32())
    texts = [
        pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int8()), pa.array([text]))
        for text in ("user", "x" * length)
    ]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(texts, ["role", "content"]))


def lying(content: bytes) -> bytes:
    """The same parquet file, whose footer says that it unpacks to one byte."""
    group = pq.read_metadata(io.BytesIO(content)).row_group(0)
    for size in {group.total_byte_size, *(group.column(leaf).total_uncompressed_size for leaf in range(2))}:
        digits = [(2 * size >> shift) & 127 for shift in range(0, (2 * size).bit_length(), 7)]
        written = bytes(digit | 128 for digit in digits[:-1]) + bytes(digits[-1:])
        content = content.replace(written, b"\x82" + b"\x80" * (len(written) - 2) + b"\x00" * (len(written) > 1))
    return content


@BOTH
def test_a_footer_is_not_believed(hub: Hub, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(loading, "SMALL_REPO", small)
    monkeypatch.setattr(unpacking, "FREE_UNPACKED", 5_000_000)
    content = lying(parquet(pa.table({"text": ["x" * 1000] * 20_000, "label": [0, 1] * 10_000}), **PLAIN))
    group = pq.read_metadata(io.BytesIO(content)).row_group(0)
    assert (group.total_byte_size, group.column(0).total_uncompressed_size) == (1, 1)
    publish(hub, {"train.parquet": content})
    with pytest.raises(DownloadTooLargeError, match="unpacks to"):
        texts()


def test_max_download_counts_what_comes_out_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "FREE_UNPACKED", 1_000)
    rows = pa.table({"text": ["word " * 40] * 400, "label": [0, 1] * 200})
    publish(hub, {"train.parquet": parquet(rows, **PLAIN)})
    monkeypatch.setattr(unpacking, "MAX_RATIO", 10**6)
    with pytest.raises(DownloadTooLargeError, match=r"unpacks to [\d.]+ kB or more; 50 kB are allowed") as caught:
        texts(max_download=50_000)
    assert caught.value.remedy == "allow more with --max-download"
    assert len(texts(max_download=200_000).samples) == 4
    monkeypatch.setattr(loading, "SMALL_REPO", 0)
    with pytest.raises(DownloadTooLargeError, match="50 kB are allowed"):
        texts(max_download=50_000)
    with pytest.raises(DownloadTooLargeError, match="50 kB are allowed"):
        open_data("user/x", Settings(max_download=50_000, split="train"), measure=True, reads="texts")
    assert len(texts(max_download=200_000).samples) == 4


LINES = b'{"text": "hello there", "label": 0}\n' * 20_000
CSV = b"text,label\n" + b"hello there,0\n" * 50_000


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files: dict[str, bytes], compression: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def arrow(rows: Any, streamed: bool = False) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (pa.ipc.new_stream if streamed else pa.ipc.new_file)(out, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return out.getvalue()


def compressed(content: bytes, codec: str) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, codec) as stream:
        stream.write(content)
    return bytes(out.getvalue())


MANY = pa.table({"text": ["hello there"] * 50_000, "label": [0] * 50_000})
PACKED: dict[str, Callable[[], bytes]] = {
    "train.jsonl.gz": lambda: gzip.compress(LINES),
    "train.json.bz2": lambda: bz2.compress(LINES),
    "train.csv.xz": lambda: lzma.compress(CSV),
    "train.csv.gz": lambda: gzip.compress(CSV),
    "train.txt.gz": lambda: gzip.compress(CSV),
    "train.jsonl.zst": lambda: compressed(LINES, "zstd"),
    "train.jsonl.lz4": lambda: compressed(LINES, "lz4"),
    "train.zip": lambda: zipped({"a.jsonl": LINES}),
    "csv.zip": lambda: zipped({"a.csv": CSV, "b.csv": CSV}),
    "twice.zip": lambda: zipped({"a.csv.gz": gzip.compress(CSV)}),
    "train.tar": lambda: tarred({f"{n}.json.gz": gzip.compress(b'{"a": "' + b"x" * 10**5 + b'"}') for n in range(9)}),
    "train.tar.gz": lambda: tarred({f"{n}.txt": CSV for n in range(5)}, "gz"),
    "holes.tar": lambda: sparse(),
    "disguised.jsonl": lambda: gzip.compress(LINES),
    "disguised.csv": lambda: zipped({"a.csv": CSV}),
    "behind.csv": lambda: b"text,label\na,0\n" + zipped({"a.csv": CSV}),
    "disguised-tar.csv": lambda: tarred({"a.csv": CSV}, "gz"),
    "train.arrow": lambda: arrow(MANY),
    "streamed.arrow": lambda: arrow(MANY, streamed=True),
    "pictures.zip": lambda: zipped({f"{name}/0.png": bytes(400_000) for name in ("one", "two")}),
}


def sparse() -> bytes:
    """An archive of a file with a hole: 12 gigabytes of nothing."""
    head = bytearray(tarfile.TarInfo("0.txt").tobuf(tarfile.GNU_FORMAT))
    head[156:157] = tarfile.GNUTYPE_SPARSE
    head[483:495] = b"%011o\0" % (12 * 10**9)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(10240 - len(head))


@pytest.mark.parametrize("name", PACKED)
def test_what_other_files_unpack_to_is_counted(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(unpacking, "FREE_UNPACKED", 500_000)
    monkeypatch.setattr(unpacking, "MAX_RATIO", 1)
    content = PACKED[name]()
    assert len(content) < 300_000
    publish(hub, {name: content})
    error = DataNotFoundError if name == "holes.tar" else DownloadTooLargeError
    with (
        pytest.raises(error, match="has a sparse file" if name == "holes.tar" else "unpacks to .* 500 kB are"),
        within(20),
    ):
        draw("user/x", Settings(n=4, evaluate=False), reads="images" if "pictures" in name else "texts")
    assert not cache.exists(), "nothing is left on the disk"


@pytest.mark.parametrize(
    "name", ["train.jsonl.gz", "train.csv.xz", "train.zip", "csv.zip", "disguised.jsonl", "train.arrow"]
)
def test_packed_files_within_the_limit_are_read(hub: Hub, name: str) -> None:
    publish(hub, {name: PACKED[name]()})
    assert len(texts().data.splits["train"]) >= 20_000


HOSTILE_TEXTS = {
    "keys.jsonl": b"".join(b'{"k%d": 1}\n' % n for n in range(20_000)),
    "keys.jsonl.gz": gzip.compress(b"".join(b'{"k%d": 1}\n' % n for n in range(20_000))),
    "columns.csv": b"a" + b",b" * 100_000 + b"\n" + b"1\n" * 5_000,
    "table.zip": zipped({"0.png": b"x", "1.png": b"x", "metadata.jsonl": b"null\n" * 3}),
    "null.jsonl.gz": gzip.compress(b"null\n" * 3),
    "nested.jsonl.gz": gzip.compress(b'{"a":' * 100_000),
    "nested.zip": zipped({"a.jsonl": b"[" * 100_000}),
    "broken.jsonl.gz": gzip.compress(LINES)[:500],
    "broken.zip": zipped({"a.jsonl": LINES})[:-30],
}


@pytest.mark.parametrize("where", ["hub", "folder"])
@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_texts_that_would_crash_or_never_end(hub: Hub, tmp_path: Path, where: str, name: str) -> None:
    """Each key of JSON becomes a column, which every row has: 20,000 rows of one key each take 3 GB."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(HOSTILE_TEXTS[name])
    publish(hub, {name: HOSTILE_TEXTS[name]})
    reads = "images" if name == "table.zip" else "texts"
    with pytest.raises(DataNotFoundError), within(10):
        draw("user/x" if where == "hub" else str(folder), Settings(n=4), reads=reads)


def test_formats_that_nobody_has_looked_at_are_not_read_from_strangers(hub: Hub) -> None:
    publish(hub, {"train.h5": b"\x89HDF\r\n\x1a\n" + bytes(100)})
    with pytest.raises(DataNotFoundError, match="files of the format 'hdf5' are only read from a folder of your own"):
        texts()


def test_images_of_a_batch_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("1", (3_000, 3_000)).save(out, "PNG")
    assert len(out.getvalue()) < 3_000
    rows = datasets.Dataset.from_dict({"image": [{"bytes": out.getvalue(), "path": None}] * 8})
    samples = Samples(
        rows.cast_column("image", datasets.Image()), Columns({"image": "image"}), tuple(range(8)), (0,) * 8
    )
    monkeypatch.setattr(dataset, "_FREE_PIXELS", 10**7)
    monkeypatch.setattr("hf_bico.runtime.environment.available_memory", lambda device: 2 * 10**8)
    with pytest.raises(MemoryExhaustedError, match="3 images of 27,000,000 pixels in all do not fit") as caught:
        next(samples.batches(8))
    assert "--batch-size" in caught.value.remedy
    assert len(next(samples.batches(2))[0]) == 2


def test_an_image_that_is_a_program_is_not_run(hub: Hub) -> None:
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(pwned) (w) file\nshowpage\n%%EOF\n"
    publish(hub, {f"train/{name}/{n}.png": program for name in ("one", "two") for n in range(4)})
    drawn = draw("user/x", Settings(n=4, evaluate=False))
    with pytest.raises(UnreadableSampleError, match="a program in PostScript"):
        next(drawn.samples.batches(1))


def test_own_folders_may_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.csv").write_text("text,label\n" + "a,0\nb,1\n" * 4)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text(f"---\n{CONFIGS.format(tmp_path / 'elsewhere.csv')}---\n")
    assert len(draw(str(tmp_path / "data"), Settings(n=4, evaluate=False), reads="texts").data.splits["train"]) == 8
