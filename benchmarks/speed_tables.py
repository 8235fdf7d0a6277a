"""Figures as tables: the same text for the terminal and for README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from figures import Figures, Limited, Line, Port, carrying

BEGIN, END = "<!-- figures: written by speed.py --readme -->", "<!-- end of figures -->"
_COLUMNS = {
    "import": ("start", "import"),
    "load": ("device", "load"),
    "read": ("sample", "read"),
    "calibrate": ("calibrate",),
    "align": ("align",),
    "transport": ("transport",),
    "write": ("write",),
    "other": ("other",),
}
_STAGE_NAMES = {
    "start": "Python's own start and end",
    "import": "import",
    "device": "the device's own start",
    "sample": "samples drawn",
    "read": "read: the task vector",
    "load": "load: both models",
    "calibrate": "calibrate",
    "align": "align",
    "transport": "transport",
    "write": "write: model, record and card",
    "other": "other",
}
_GIGA = 1e9


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns also line up in a terminal; all but the first are numbers."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def ports_table(ports: Iterable[Port]) -> str:
    """Seconds by stage: ours in a fresh process, ours, the obvious implementation and the floor."""
    rows = [["port", "", *_COLUMNS, "loaded to carried", "in all"]]
    for port in ports:
        named = f"{port.pair}, N = {port.samples}"
        if port.fresh is not None:
            rows.append([named, "whole command", *_stages(port.fresh)])
            named = ""
        rows.append([named, "ours", *_stages(port.ours)])
        rows.append(["", f"obvious {_mark(port)}", *_stages(port.obvious)])
        rows.append(["", "floor", *_stages(port.floor)])
    return table(rows)


def _stages(seconds: Mapping[str, float]) -> list[str]:
    cells = []
    for stages in _COLUMNS.values():
        found = [seconds[stage] for stage in stages if stage in seconds]
        cells.append(_seconds(sum(found)) if found else "")
    return [*cells, _seconds(carrying(seconds)), _seconds(sum(seconds.values()))]


def _mark(port: Port) -> str:
    return "(a)" if port.how == IN_FULL else "(b)" if port.how == A_SHAPE else "(c)"


IN_FULL = "run in full"
A_SHAPE = "all passes run; of the sites one of each shape timed, times their number"


def ratios_table(ports: Sequence[Port]) -> str:
    """From loaded models to the carried change: ours beside the other two, what was held, and how far both agree."""
    head = ["port", "ours / floor", "obvious / ours", "peak, GB", "weights, GB", "batch", "stored by obvious, GB"]
    rows = [[*head, "largest difference", "image processors, s"]]
    for port in ports:
        ours = carrying(port.ours)
        rows.append(
            [
                f"{port.pair}, N = {port.samples}",
                f"{ours / carrying(port.floor):.1f}",
                f"{carrying(port.obvious) / ours:.1f}",
                f"{port.peak / _GIGA:.1f}",
                f"{port.weights / _GIGA:.1f}",
                str(port.batch_size),
                f"{port.stored_bytes / _GIGA:.1f}",
                "" if port.difference is None else f"{port.difference:.0e}",
                "" if port.preparing is None else _seconds(port.preparing),
            ]
        )
    return table(rows)


def notes(ports: Sequence[Port]) -> str:
    """How the obvious implementation's times came about."""
    lines = []
    for mark, how in (("(a)", IN_FULL), ("(b)", A_SHAPE)):
        if any(_mark(port) == mark for port in ports):
            lines.append(f"- {mark} {how}")
    lines += [f"- (c) N = {port.samples}: {port.how}" for port in ports if _mark(port) == "(c)"]
    return "\n".join(lines)


def command_table(port: Port) -> str:
    """Where the time of the whole command goes."""
    seconds = port.fresh or {}
    whole = sum(seconds.values())
    rows = [["stage", "seconds", "share"]]
    rows += [
        [name, _seconds(seconds[stage]), f"{100 * seconds[stage] / whole:.0f}%"]
        for stage, name in _STAGE_NAMES.items()
        if stage in seconds
    ]
    return table([*rows, ["in all", _seconds(whole), "100%"]])


def limits_table(limited: Sequence[Limited]) -> str:
    rows = [["port", "limit", "enforced", "peak, GB", "batch", "loaded to carried", "in all", "difference"]]
    rows += [
        [
            f"{one.pair}, N = {one.samples}",
            one.limit,
            "yes" if one.enforced else "no",
            f"{one.peak / _GIGA:.2f}",
            str(one.batch_size),
            _seconds(carrying(one.seconds)),
            _seconds(sum(one.seconds.values())),
            f"{one.difference:.0e}",
        ]
        for one in limited
    ]
    return table(rows)


def growth_table(lines: Sequence[Line]) -> str:
    """Seconds at each value, and the exponent of the power that they grow with."""
    rows = [["what grows", "values", "seconds", "exponent", "of calibrate", "of align"]]
    rows += [
        [
            f"{line.what} ({line.fixed})",
            ", ".join(map(str, line.values)),
            ", ".join(_seconds(found) for found in map(carrying, line.seconds)),
            *(f"{line.exponent(stages):.2f}" for stages in (("calibrate", "align", "transport"), ("calibrate",))),
            f"{line.exponent(('align',)):.2f}",
        ]
        for line in lines
    ]
    return table(rows)


def rates_table(rates: Mapping[str, float]) -> str:
    rows = [["rate", "measured"]]
    for name, label in (("float32", "float32 products, no TF32"), ("bfloat16", "bfloat16"), ("float64", "float64")):
        rows.append([label, f"{rates[name] / 1e12:.3g} TFLOP/s"])
    for name, label in (
        ("to_device", "host to device, pinned"),
        ("to_host", "device to host, pinned"),
        ("read", "file read, in the page cache"),
        ("write", "file written, to the page cache"),
    ):
        rows.append([label, f"{rates[name] / _GIGA:.3g} GB/s"])
    return table(rows)


def polar_table(rows: Sequence[Mapping[str, object]]) -> str:
    """What benchmarks/polar.py gives, as it gives it."""
    return table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def sections(figures: Figures) -> list[tuple[str, str]]:
    """All tables that there are figures for, each under its title."""
    found = []
    if figures.rates:
        found.append(("Rates, measured in the same run", rates_table(figures.rates)))
    if figures.polar:
        found.append(("The polar factor", polar_table(figures.polar)))
    if figures.ports:
        found.append(("Seconds by stage", f"{ports_table(figures.ports)}\n\n{notes(figures.ports)}"))
        found.append(("From loaded models to the carried change", ratios_table(figures.ports)))
    found += [
        (f"Where the time of the whole command goes: {port.pair}, N = {port.samples}", command_table(port))
        for port in figures.ports
        if port.fresh is not None
    ]
    if figures.limited:
        found.append(("Within a limit of memory", limits_table(figures.limited)))
    if figures.growth:
        found.append(("Growth", growth_table(figures.growth)))
    return found


def write_readme(figures: Figures, file: Path) -> None:
    """Put the tables between the two marks of a page."""
    before, _, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"{file} has no place for the figures: {BEGIN} ... {END}")
    versions = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    about = f"Measured on {figures.device}, {figures.sizes}, {versions}, in one run of\n\n```sh\n{figures.command}\n```"
    tables = "\n\n".join(f"### {title}\n\n{text}" for title, text in sections(figures))
    file.write_text(f"{before}{BEGIN}\n\n{about}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"
