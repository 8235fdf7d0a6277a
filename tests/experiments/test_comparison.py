"""A comparison's numbers, its log and its files."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image

from hf_bico.errors import OutputError, OutputExistsError, RecordError, UsageError
from hf_bico.experiments.compare.cells import Cell, CellKey, Refusal, method_label, read_row, split_method
from hf_bico.experiments.compare.comparison import Comparison, caption, live_table
from hf_bico.experiments.compare.log import LOG_FILE, CellLog
from hf_bico.experiments.compare.picture import _panels, method_style
from support import forks

METHODS = ("gradfix", "theseus", "bico", "bico-path")
SIZES, SEEDS, DATA = (10, 20, 50), (0, 1, 2), ("SVHN", "DTD", "Cars")
IDENTITY = {"source": {"id": "a/b", "commit": "1" * 40}, "target": {"id": "c/d", "sha256": "2"}, "alpha": 1.0}
HOSTILE = "a|b\n# no heading <b>*`$x$` ](http://x) \u202e"


def measured(data_sets: tuple[str, ...] = DATA, sizes: tuple[int, ...] = SIZES) -> list[Cell]:
    draw = random.Random(0)
    cells = []
    for data in data_sets:
        cells += [Cell(data, "target", draw.random()), Cell(data, "source", draw.random())]
        cells += [Cell(data, "target fine-tuned", draw.random()), Cell(data, "naive", draw.random())]
        for n in sizes:
            for seed in SEEDS:
                cells += [Cell(data, method, draw.random(), n=n, seed=seed) for method in METHODS]
                cells.append(Cell(data, "bico", draw.random(), n=n, seed=seed, control=True))
                cells.append(Cell(data, "target", draw.random(), n=n, seed=seed, readout=True))
    return cells


def compared(cells: list[Cell] | None = None, **fields: object) -> Comparison:
    return Comparison("a/b", "c/d", tuple(measured() if cells is None else cells), **fields)  # type: ignore[arg-type]


def find(comparison: Comparison, method: str, n: int | None = None, **fields: object) -> dict[str, object]:
    wanted = {"control": False, "readout": False, "protocol": None, "per_class": None, **fields}
    (row,) = (
        row
        for row in comparison.rows()
        if (row.method, row.n) == (method, n) and all(getattr(row, name) == value for name, value in wanted.items())
    )
    return row.as_dict()


def test_a_row_is_the_mean_and_the_sample_deviation_over_seeds_as_numpy_has_them() -> None:
    cells = measured()
    found = find(compared(cells), "bico", 20)
    table = np.array(
        [
            [c.value for c in cells if (c.data, c.method, c.n, c.seed, c.control) == (data, "bico", 20, seed, False)]
            for data in DATA
            for seed in SEEDS
        ]
    ).reshape(len(DATA), len(SEEDS))
    for data, values in zip(DATA, table, strict=True):
        assert found["values"][data] == pytest.approx({"mean": values.mean(), "std": values.std(ddof=1), "seeds": 3})
    average = {"mean": table.mean(), "std": table.mean(0).std(ddof=1), "seeds": 3}
    assert found["average"] == pytest.approx(average)
    target = np.mean([c.value for c in cells if (c.method, c.n) == ("target", None)])
    assert found["gain"] == pytest.approx(table.mean() - target)


def test_one_seed_has_no_deviation() -> None:
    found = find(compared([Cell("x", "bico", 0.5, n=10, seed=0)]), "bico", 10)
    assert found["values"] == {"x": {"mean": 0.5, "std": None, "seeds": 1}}
    assert found["gain"] is None


def test_an_average_needs_every_data_set_and_its_deviation_every_seed() -> None:
    cells = [Cell("x", "bico", 0.5, n=10, seed=0), Cell("x", "bico", 0.7, n=10, seed=1)]
    assert find(compared(cells, data_sets=("x", "y")), "bico", 10)["average"] is None
    uneven = [*cells, Cell("y", "bico", 0.2, n=10, seed=1)]
    assert find(compared(uneven), "bico", 10)["average"] == pytest.approx({"mean": 0.4, "std": None, "seeds": 1})


def test_a_probe_is_held_against_the_targets_probe_of_the_same_samples() -> None:
    probe = {"seed": 0, "protocol": "probe"}
    cells = [Cell("x", "target", 0.1), Cell("x", "bico", 0.3, n=10, seed=0)]
    cells += [Cell("x", "target", value, n=n, **probe) for n, value in ((10, 0.4), (20, 0.6))]
    cells += [Cell("x", "bico", 0.7, n=n, **probe) for n in (10, 20)]
    comparison = compared(cells)
    assert find(comparison, "bico", 10)["gain"] == pytest.approx(0.2)
    assert find(comparison, "bico", 10, protocol="probe")["gain"] == pytest.approx(0.3)
    assert find(comparison, "bico", 20, protocol="probe")["gain"] == pytest.approx(0.1)
    assert [row.label for row in comparison.rows()][2:4] == ["target, probe", "BiCo, probe"]


def test_rows_stand_as_in_the_paper() -> None:
    labels = [(row.label, row.n) for row in compared().rows()]
    references = ["target, zero-shot", "source, fine-tuned", "target, fine-tuned", "naive (padded)"]
    methods = ["target, readout", "GradFix", "THESEUS", "BiCo", "BiCo, mispaired", "BiCo-path"]
    assert labels == [*((name, None) for name in references), *((name, n) for n in SIZES for name in methods)]
    given = [row.method for row in compared(methods=("bico-path", "theseus")).rows() if row.n == 10]
    assert given == ["target", "bico-path", "theseus", "gradfix", "bico", "bico"]


def test_the_table_is_in_percent_with_a_line_between_groups() -> None:
    cells = [Cell("x", "target", 0.5), Cell("x", "bico", 0.7, n=10, seed=0), Cell("x", "bico", 0.8, n=10, seed=1)]
    cells.append(Cell("x", "theseus", 0.45, per_class=2, seed=0))
    refused = Refusal("transfusion", "the heads differ", "x")
    assert compared(cells, refusals=(refused, refused)).table().splitlines() == [
        "model                      N           x   gain",
        "",
        "target, zero-shot          -        50.0      -",
        "",
        "BiCo                      10  75.0 ± 7.1  +25.0",
        "",
        "THESEUS            2 a class        45.0   -5.0",
        "",
        "not measured: TransFusion on x: the heads differ",
    ]


# Methods with an alpha of their own, and what was held back


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("bico", ("bico", None)),
        ("bico@0.5", ("bico", 0.5)),
        ("bico-path@-1", ("bico-path", -1.0)),
        ("bico@1e3", ("bico", 1000.0)),
        ("bico@", ("bico@", None)),
        ("bico@one", ("bico@one", None)),
        ("bico@inf", ("bico@inf", None)),
        ("bico@1@2", ("bico@1@2", None)),
    ],
)
def test_a_row_is_a_method_and_its_alpha(row: str, parts: tuple[str, float | None]) -> None:
    assert split_method(row) == parts


def test_one_alpha_has_one_name() -> None:
    assert {read_row(f"bico@{number}") for number in ("1", "1.0", "01", "1e0", "+1")} == {"bico@1"}
    assert split_method(read_row(f"bico@{1 / 3}"))[1] == 1 / 3, "however long it is"
    assert [method_label(row) for row in ("bico", "bico@1.0", "bico@0.5", "naive@1", "elsewhere@2")] == [
        *("BiCo", "BiCo, alpha 1", "BiCo, alpha 0.5", "naive (padded), alpha 1", "elsewhere, alpha 2"),
    ]


def test_rows_with_an_alpha_stand_before_what_a_port_does() -> None:
    names = ["bico-path", "bico", "bico@2", "bico@0.5", "theseus@1", "fewshot", "naive@1", "mine@1", "target"]
    found = compared([Cell("x", name, 0.5, n=10, seed=0) for name in names])
    ordered = ["target", "naive@1", "fewshot", "theseus@1", "bico@0.5", "bico@2", "bico", "bico-path", "mine@1"]
    assert [row.method for row in found.rows()] == ordered
    given = compared(list(found.cells), methods=("bico", "bico@2"))
    assert [row.method for row in given.rows()][1:4] == ["bico", "bico@2", "naive@1"]
    assert [row.label for row in found.rows()][-4:-1] == ["BiCo, alpha 2", "BiCo", "BiCo-path"]


def held_back() -> list[Cell]:
    """Two draws of three of bico; the third of bico-path has its number by itself."""
    cells = [Cell("x", "target", 0.466), Cell("x", "bico@1", 0.4, n=10, seed=0)]
    cells += [Cell("x", "bico", 0.466, n=10, seed=seed, held_back=True) for seed in (0, 1)]
    cells += [Cell("x", "bico", 0.5, n=10, seed=2), Cell("x", "bico-path", 0.466, n=10, seed=2)]
    return cells


def test_the_tables_say_how_many_draws_were_held_back() -> None:
    found = compared(held_back())
    assert found.table().splitlines() == [
        "model               N           x  gain  held back",
        "",
        "target, zero-shot   -        46.6     -          -",
        "",
        "BiCo, alpha 1      10        40.0  -6.6          -",
        "BiCo               10  47.7 ± 2.0  +1.1     2 of 3",
        "BiCo-path          10        46.6  +0.0          -",
    ]
    assert "| **BiCo** | 10 | **47.7 ± 2.0** | +1.1 | 2 of 3 |" in found.to_markdown()
    assert [line.cells[-1] for line in live_table(found.rows(), found.data_sets).lines] == ["-", "-", "2 of 3", "-"]
    both = compared([*held_back(), *(replace(cell, data="y") for cell in held_back())])
    assert [row.held_back for row in both.rows()] == [0, 0, 4, 0]
    assert "4 of 6" in both.table()


def test_the_caption_explains_what_was_held_back_where_something_was() -> None:
    clause = "; held back are draws whose samples speak against the change: they count as the target."
    assert caption(compared(held_back()).rows()).endswith(clause)
    assert "held back" not in compared().to_markdown()


def test_what_was_held_back_is_kept_in_every_file_and_in_the_log(tmp_path: Path) -> None:
    found = compared(held_back())
    found.save(tmp_path / "saved")
    assert Comparison.load(tmp_path / "saved") == found
    header, *lines = (tmp_path / "saved" / "comparison.csv").read_text().splitlines()
    assert header.endswith(",value,held_back")
    assert [line.rpartition(",")[2] for line in lines].count("true") == 2
    rows = json.loads((tmp_path / "saved" / "comparison.json").read_text())["rows"]
    assert {row["label"]: row["held_back"] for row in rows}["BiCo"] == 2
    with CellLog.open(tmp_path / "log", IDENTITY) as log:
        for cell in found.cells:
            log.add(cell)
    with CellLog.open(tmp_path / "log", IDENTITY) as log:
        assert log.cells == found.cells
    with pytest.raises(UsageError, match="was measured as"):
        Comparison.merged([found, compared([replace(cell, held_back=False) for cell in found.cells])])


def test_files_from_before_anything_could_be_held_back_are_read(tmp_path: Path) -> None:
    found = compared()
    plain = json.loads(found.to_json())
    for cell in plain["cells"]:
        assert cell.pop("held_back") is False
    assert Comparison.from_json(json.dumps(plain)) == found
    with CellLog.open(tmp_path, IDENTITY) as log:
        log.add(Cell("x", "bico", 0.5, n=10, seed=0))
    lines = (tmp_path / LOG_FILE).read_text()
    (tmp_path / LOG_FILE).write_text(lines.replace(', "held_back": false', ""))
    with CellLog.open(tmp_path, IDENTITY) as log:
        assert log.cells == (Cell("x", "bico", 0.5, n=10, seed=0),)
        assert (tmp_path / LOG_FILE).read_text() != lines


def test_a_line_with_an_alpha_has_its_methods_colour_and_a_style_of_its_own(tmp_path: Path) -> None:
    names = ("bico@0.5", "bico@1", "bico")
    cells = [Cell("x", name, 0.5, n=n, seed=0) for name in names for n in (10, 20)]
    found = compared([*cells, Cell("x", "naive@1", 0.4)])
    assert found.draw(tmp_path / "x.png")
    [panel] = _panels(found.rows(), {})
    styles = {line.key.method: line.style for line in panel.lines}
    assert {styles[name]["color"] for name in names} == {method_style("bico")[0]}
    assert [styles[name]["label"] for name in names] == ["BiCo, alpha 0.5", "BiCo, alpha 1", "BiCo"]
    assert len({styles[name]["linestyle"] for name in names}) == 3
    assert [styles[name]["markerfacecolor"] for name in names] == ["white", "white", method_style("bico")[0]]
    assert method_style("naive@1") == method_style("naive")


def test_csv_read_back_is_every_cell_in_full_precision() -> None:
    comparison = compared(
        [*measured(), *held_back(), Cell(HOSTILE + '",\r', "bico", 1 / 3, per_class=2, seed=0, protocol="probe")]
    )
    found = []
    for line in csv.DictReader(StringIO(comparison.to_csv(), newline="")):
        numbers = {name: int(line[name]) if line[name] else None for name in ("n", "per_class", "seed")}
        flags = {name: {"true": True, "false": False}[line[name]] for name in ("control", "readout", "held_back")}
        protocol = line["protocol"] or None
        found.append(Cell(line["data"], line["method"], float(line["value"]), **numbers, **flags, protocol=protocol))
    assert tuple(found) == comparison.cells


def test_shuffled_cells_give_the_same_bytes(tmp_path: Path) -> None:
    cells = measured()
    about = {"evaluation": {"split": "test", "n": 1000}, "alpha": 1.0}
    compared(cells, about=about).save(tmp_path / "one")
    random.Random(1).shuffle(cells)
    compared([*cells, cells[0]], about=dict(reversed(about.items()))).save(tmp_path / "two")
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == ["comparison.csv", "comparison.json", "comparison.md", "comparison.png"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_saved_comparison_is_loaded_as_it_was(tmp_path: Path) -> None:
    comparison = compared(
        methods=("bico",), data_sets=DATA, about={"split": "test"}, refusals=(Refusal("naive", "no"),)
    )
    comparison.save(tmp_path)
    assert Comparison.load(tmp_path) == comparison
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(RecordError):
        Comparison.load(tmp_path)
    with pytest.raises(RecordError, match="holds no comparison.json"):
        Comparison.load(tmp_path / "nowhere")


def test_hostile_names_stay_in_their_cells_of_the_markdown_table(tmp_path: Path) -> None:
    comparison = compared(
        measured((HOSTILE, "[x](y)")), refusals=(Refusal("own|method", HOSTILE, HOSTILE),), title=HOSTILE
    )
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(comparison.to_markdown())
    assert sum(token.type == "heading_open" for token in tokens) == 1
    columns = len(DATA[:2]) + 4
    cells = [token for token in tokens if token.type in ("th_open", "td_open")]
    assert len(cells) == columns * (1 + len(comparison.rows()))
    inside = [part for token in tokens if token.type == "inline" for part in token.children or ()]
    assert {part.type for part in inside} <= {"text", "text_special", "strong_open", "strong_close"}
    assert all(token.type not in ("html_block", "hr") for token in tokens)
    comparison.save(tmp_path)
    assert compared(measured(("\ud800",))).save(tmp_path)


def test_the_best_average_of_each_size_is_bold_in_markdown() -> None:
    values = {"bico": 0.8, "theseus": 0.6}
    cells = [Cell("x", method, value, n=n, seed=0) for n in (10, 20) for method, value in values.items()]
    bold = [line for line in compared([Cell("x", "target", 0.9), *cells]).to_markdown().splitlines() if "**" in line]
    assert bold == [f"| **BiCo** | {n} | **80.0** | -10.0 |" for n in (10, 20)]


def test_merging_takes_all_cells_and_refuses_two_values_of_one() -> None:
    one, two = compared(), compared([replace(cell, value=cell.value / 2) for cell in measured()])
    with pytest.raises(UsageError, match="was measured as"):
        Comparison.merged([one, two])
    both = Comparison.merged([one.prefixed("w0 "), two.prefixed("w1 ")], title="two worlds")
    assert both.data_sets == tuple(f"{world} {data}" for world in ("w0", "w1") for data in sorted(DATA))
    assert (both.source, both.title, len(both.cells)) == ("a/b", "two worlds", 2 * len(measured()))
    halves = [find(one_of, "bico", 50)["average"]["mean"] for one_of in (one, two)]
    assert find(both, "bico", 50)["average"]["mean"] == pytest.approx(np.mean(halves))


def colours(picture: bytes) -> set[tuple[int, ...]]:
    image = Image.open(BytesIO(picture)).convert("RGB")
    return {colour for count, colour in image.getcolors(image.width * image.height) if count > 50}


@pytest.mark.parametrize("sizes", [SIZES, (10,)])
def test_the_picture_shows_every_method_in_its_colour(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    assert compared(measured((HOSTILE,), sizes), title=HOSTILE).draw(tmp_path / "x.png")
    found = (tmp_path / "x.png").read_bytes()
    assert b"Software" not in found
    assert {(0xD5, 0x5E, 0), (0, 0x72, 0xB2), (0, 0x9E, 0x73), (0xCC, 0x79, 0xA7), (0x33,) * 3} <= colours(found)


def test_what_the_held_out_samples_leave_uncertain_is_shaded() -> None:
    """In percent, 1.96 times the standard error of the mean of the data sets' accuracies."""
    about = {"evaluation": {"x": {"samples": 100}, "y": {"samples": 400}}}
    cells = [Cell(data, "target", value) for data, value in (("x", 0.5), ("y", 0.2))]
    found = compared([*cells, *(Cell(data, "bico", 0.6, n=10, seed=0) for data in ("x", "y"))], about=about)
    figure = found.draw()
    assert figure is not None
    [axes] = figure.axes
    by_hand = 100 * 1.96 * ((0.5 * 0.5 / 100 + 0.2 * 0.8 / 400) ** 0.5 / 2)
    widths = [patch.get_width() for patch in axes.patches]
    assert widths[0] == pytest.approx(2 * by_hand)
    assert "500 held-out samples in all" in axes.get_xlabel()

    curves = compared([*found.cells, *(Cell(data, "bico", 0.6, n=20, seed=0) for data in ("x", "y"))], about=about)
    figure = curves.draw()
    assert figure is not None
    [axes] = figure.axes
    [band] = axes.patches
    assert band.get_height() == pytest.approx(2 * by_hand)
    assert "the target's 95% interval" in axes.get_xlabel()


@pytest.mark.parametrize("about", [{}, {"evaluation": {"x": {"samples": "many"}}}, {"merged": [{}, 3]}, {"merged": 3}])
def test_without_the_number_of_held_out_samples_nothing_is_shaded(about: dict[str, Any]) -> None:
    figure = compared([Cell("x", "target", 0.5), Cell("x", "bico", 0.6, n=10, seed=0)], about=about).draw()
    assert figure is not None
    assert not figure.axes[0].patches
    assert "shaded" not in figure.axes[0].get_xlabel()


def test_merged_comparisons_keep_their_numbers_of_held_out_samples() -> None:
    parts = [
        compared([Cell("x", "target", 0.5)], about={"evaluation": {"x": {"samples": count}}, "part": count})
        for count in (10, 20)
    ]
    merged = Comparison.merged([part.prefixed(f"{number}: ") for number, part in enumerate(parts)])
    assert merged.held_out == {"0: x": 10, "1: x": 20}


def test_a_users_own_style_does_not_change_the_picture(tmp_path: Path) -> None:
    import matplotlib

    compared().draw(tmp_path / "one.png")
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "black", "savefig.dpi": 30}):
        compared().draw(tmp_path / "two.png")
        assert matplotlib.rcParams["axes.facecolor"] == "black"
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_panels_for_protocols_and_samples_of_each_class(tmp_path: Path) -> None:
    cells = measured() + [replace(cell, protocol="probe") for cell in measured() if cell.n]
    compared(cells).draw(tmp_path / "two.png")
    compared().draw(tmp_path / "one.png")
    tall, short = (Image.open(tmp_path / f"{name}.png").height for name in ("two", "one"))
    assert tall > 1.7 * short
    by_class = [replace(cell, n=None, per_class=cell.n) for cell in measured()]
    assert compared(by_class).draw(tmp_path / "class.png")


def test_nothing_is_drawn_of_nothing_and_an_old_picture_goes(tmp_path: Path) -> None:
    compared().save(tmp_path)
    written = compared([Cell("x", "bico", 0.5, n=10, seed=0)], data_sets=("x", "y")).save(tmp_path)
    assert [file.name for file in written] == ["comparison.csv", "comparison.json", "comparison.md"]
    assert not (tmp_path / "comparison.png").exists()
    assert compared([]).table() == "model  N  gain"


def test_the_live_table_shows_what_is_there_and_no_markup() -> None:
    from rich.console import Console

    console = Console(file=StringIO(), width=160)
    found = compared([Cell("[red]x[/red]", "target", 0.5), Cell("y", "bico", 0.7, n=10, seed=0)])
    console.print(live_table(found.rows(), found.data_sets))
    shown = console.file.getvalue()
    assert "[red]x[/red]" in shown
    assert "target, zero-shot" in shown
    assert "70.0" in shown


def test_the_live_table_marks_the_best_and_what_lost_in_words() -> None:
    cells = [Cell("x", "target", 0.5), Cell("x", "theseus", 0.4, n=10, seed=0), Cell("x", "bico", 0.7, n=10, seed=0)]
    found = compared([*cells, Cell("x", "bico-path", 0.6, n=10, seed=0)])
    marks = {line.cells[0]: line.mark for line in live_table(found.rows(), found.data_sets).lines}
    assert marks == {"target, zero-shot": "", "THESEUS": "worse", "BiCo": "best", "BiCo-path": ""}


def test_a_log_goes_on_where_it_stopped_and_keeps_what_is_not_asked_for(tmp_path: Path) -> None:
    cells = measured()
    with CellLog.open(tmp_path / "a" / "b", IDENTITY) as log:
        for cell in cells[:5]:
            log.add(cell)
        with pytest.raises(ValueError, match="already"):
            log.add(replace(cells[0], value=0.0))
    with CellLog.open(tmp_path / "a" / "b", dict(reversed(IDENTITY.items()))) as log:
        assert log.cells == tuple(cells[:5])
        assert log.has(cells[4].key)
        assert not log.has(cells[5].key)
        log.add(cells[5])
        asked = [cells[5].key, cells[1].key, cells[7].key]
        assert log.chosen(asked) == (cells[5], cells[1])
    lines = (tmp_path / "a" / "b" / LOG_FILE).read_text().splitlines()
    assert len(lines) == 1 + 6


def test_a_key_is_the_cell_without_its_value() -> None:
    key = CellKey("x", "bico", n=10, seed=3, control=True)
    assert key.with_value(0.5) == Cell("x", "bico", 0.5, n=10, seed=3, control=True)
    assert key.with_value(0.5, held_back=True).key == key


def test_a_last_line_cut_anywhere_is_dropped_and_written_again(tmp_path: Path) -> None:
    cells = measured()[:3]
    with CellLog.open(tmp_path / "whole", IDENTITY) as log:
        for cell in cells:
            log.add(cell)
    whole = (tmp_path / "whole" / LOG_FILE).read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    (tmp_path / "cut").mkdir()
    for length in range(start, len(whole)):
        (tmp_path / "cut" / LOG_FILE).write_bytes(whole[:length])
        with CellLog.open(tmp_path / "cut", IDENTITY) as log:
            assert log.cells == tuple(cells[:2])
            assert log.file.read_bytes() == whole[:start]
            log.add(cells[2])
        assert (tmp_path / "cut" / LOG_FILE).read_bytes() == whole


def test_a_line_in_the_middle_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with CellLog.open(tmp_path, IDENTITY) as log:
        for cell in measured()[:3]:
            log.add(cell)
    lines = (tmp_path / LOG_FILE).read_bytes().splitlines(keepends=True)
    for broken in (
        b"{\n",
        b"[]\n",
        b'{"cell": {"data": "x"}}\n',
        b'{"cell": {"data": "x", "method": "y", "value": NaN}}\n',
    ):
        (tmp_path / LOG_FILE).write_bytes(b"".join([lines[0], broken, *lines[2:]]))
        with pytest.raises(RecordError, match="line 2 of"), CellLog.open(tmp_path, IDENTITY):
            pass
    (tmp_path / LOG_FILE).write_bytes(b"".join([*lines, lines[1]]))
    with pytest.raises(RecordError, match="line 5 of"), CellLog.open(tmp_path, IDENTITY):
        pass


def test_another_identity_is_refused_by_what_differs(tmp_path: Path) -> None:
    with CellLog.open(tmp_path, IDENTITY) as log:
        log.add(measured()[0])
    other = {**IDENTITY, "alpha": 2.0, "target": {"id": "c/d", "sha256": "3"}, "new": None}
    with pytest.raises(UsageError) as caught, CellLog.open(tmp_path, other):
        pass
    said = 'target.sha256 was "2", now "3"; alpha was 1.0, now 2.0; new was not given, now null'
    assert caught.value.cause == f"'{tmp_path}' holds another comparison: {said}"
    assert "--overwrite" in caught.value.remedy
    with CellLog.open(tmp_path, IDENTITY) as log:  # neither locked nor changed by the refusal
        assert len(log.cells) == 1


def test_overwriting_starts_anew_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    with CellLog.open(tmp_path, IDENTITY) as log:
        log.add(measured()[0])
    compared().save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with CellLog.open(tmp_path, {"target": "other"}, overwrite=True) as log:
        assert log.cells == ()
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".lock") == [LOG_FILE, "notes.txt"]
    assert json.loads((tmp_path / LOG_FILE).read_text())["identity"] == {"target": "other"}


@pytest.mark.parametrize("name", ["photo.jpg", "bico.json", LOG_FILE, "comparison.csv"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_something_else_is_refused_and_left_alone(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).write_text('{"cell": 1}\n')
    with pytest.raises(OutputExistsError), CellLog.open(tmp_path, IDENTITY, overwrite):
        pass
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, '{"cell": 1}\n')]


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputExistsError, match="is not a folder"), CellLog.open(tmp_path / "file", IDENTITY):
        pass
    for place in (tmp_path / "file" / "in", tmp_path / ("x" * 300)):
        with pytest.raises(OutputError), CellLog.open(place, IDENTITY):
            pass


def test_a_start_that_was_cut_short_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".cells.jsonl.partial").write_text('{"for')
    (tmp_path / ".cells.lock").touch()
    with CellLog.open(tmp_path, IDENTITY) as log:
        assert log.cells == ()
    assert not (tmp_path / ".cells.jsonl.partial").exists()


HOLD = """
import sys, time
from hf_bico.experiments.compare.cells import Cell
from hf_bico.experiments.compare.log import CellLog
with CellLog.open(sys.argv[1], {"target": "B"}) as log:
    log.add(Cell("x", "bico", 0.5, n=10, seed=0))
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_cannot_have_one_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    holder = forks.start(str(tmp_path), code=HOLD)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for overwrite in (False, True):
            with (
                pytest.raises(OutputError, match="another process"),
                CellLog.open(tmp_path, {"target": "B"}, overwrite),
            ):
                pass
    finally:
        holder.kill()
        holder.communicate()
    with CellLog.open(tmp_path, {"target": "B"}) as log:
        assert [cell.value for cell in log.cells] == [0.5]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on files")
def test_a_full_disk_leaves_whole_lines_and_an_error(tmp_path: Path) -> None:
    script = f"""
import resource, signal, sys
from hf_bico.experiments.compare.cells import Cell
from hf_bico.experiments.compare.log import CellLog
from hf_bico.errors import OutputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with CellLog.open({str(tmp_path)!r}, {{"target": "B"}}) as log:
    log.add(Cell("x", "bico", 0.5, n=10, seed=0))
    size = log.file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))
    try:
        log.add(Cell("x", "bico", 0.6, n=10, seed=1))
    except OutputError as error:
        print(error.cause)
    assert log.file.stat().st_size == size and len(log.cells) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.add(Cell("x", "bico", 0.6, n=10, seed=1))
"""
    done = forks.run(code=script)
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stdout
    with CellLog.open(tmp_path, {"target": "B"}) as log:
        assert [cell.value for cell in log.cells] == [0.5, 0.6]


def test_a_comparison_needs_no_torch() -> None:
    heavy = {"torch", "matplotlib", "numpy", "rich"}
    script = f"import sys, hf_bico.experiments.compare.comparison; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_reference_may_be_added_later_but_not_be_another(tmp_path: Path) -> None:
    with CellLog.open(tmp_path / "log", {"target": "B"}) as log:
        log.add(Cell("digits", "bico", 0.5, n=10, seed=0))
    for _ in range(2):
        with CellLog.open(tmp_path / "log", {"target": "B"}) as log:
            log.add_reference("fine_tuned", {"id": "B-tuned"})
            assert len(log.cells) == 1
    with CellLog.open(tmp_path / "log", {"target": "B"}) as log, pytest.raises(UsageError, match="fine_tuned"):
        log.add_reference("fine_tuned", {"id": "another"})


@pytest.mark.parametrize("tuned", [None, {"id": "B-tuned"}])
def test_a_log_of_an_earlier_version_is_gone_on_with(tmp_path: Path, tuned: dict[str, str] | None) -> None:
    """Which had the fine-tuned target in its first line."""
    with CellLog.open(tmp_path / "log", {"target": "B", "fine_tuned": tuned}) as log:
        log.add(Cell("digits", "bico", 0.5, n=10, seed=0))
    with CellLog.open(tmp_path / "log", {"target": "B"}) as log:
        assert len(log.cells) == 1
        log.add_reference("fine_tuned", {"id": "B-tuned"})
