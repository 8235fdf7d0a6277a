"""What a case of "looks fine, but is not" is: an input, what is wrong with it, and what the tool must say to it.

Here are the stage on which cases are played, the small world's models and data, and the three good endings: the result
is that of the sound input, the input is refused, or the doubt is said. The cases themselves are in the other modules
`fine_...`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_bico
from hf_bico.errors import BicoError
from hf_bico.experiments.demo.world import World
from hf_bico.porting.result import ChangeResult, Ported
from hf_bico.reports.record import ChangeRecord, Record
from hf_bico.reports.verdict import lead_sentence, outlook_sentence
from support.paper import PAPER

TASK = "inverted"
FILE = "open_clip_model.safetensors"
State = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What came out: the change of the target's tensors, and every sentence that was said about it."""

    change: Mapping[str, Tensor]
    said: tuple[str, ...]


@dataclass
class Stage:
    """Sound models and data, of which cases make unsound copies."""

    world: World
    folder: Path
    _kept: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.world.base("narrow")

    @property
    def tuned(self) -> Path:
        return self.world.fine_tuned("narrow", TASK)

    @property
    def target(self) -> Path:
        return self.world.base("wide")

    @property
    def data(self) -> Path:
        return self.world.data(TASK)

    def place(self, name: str) -> Path:
        """A folder of that name that is not there yet, beside those of no other case."""
        number = self._kept["places"] = self._kept.get("places", 0) + 1
        folder = self.folder / str(number) / name
        folder.parent.mkdir(parents=True)
        return folder

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What several cases use, made when the first of them does."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def copied(self, model: Path, name: str | None = None) -> Path:
        return Path(shutil.copytree(model, self.place(name or model.name)))

    def altered(self, model: Path, alter: Callable[[State], State], name: str | None = None) -> Path:
        """A copy of a model with other weights."""
        folder = self.copied(model, name)
        rewrite(folder / FILE, alter)
        return folder

    def port(self, source: Path | None = None, **changes: Any) -> Outcome:
        """A port of the fine-tune, or of another source, with some of its inputs changed."""
        inputs = {"to": self.target, "base": self.base, "data": self.data, "n": 100, "evaluate": False}
        return outcome_of(hf_bico.port(source or self.tuned, **{**inputs, **PAPER, **changes}))

    def clean(self) -> Outcome:
        """The port of the sound fine-tune."""
        return self.once("clean", self.port)


def outcome_of(made: Ported | ChangeResult) -> Outcome:
    head = {} if made.form.head is None else {f"the head's {name}": t for name, t in made.form.head.tensors.items()}
    return Outcome({**made.form.changes, **head}, (*made.record.notices, *_doubts(made.record)))


def _doubts(record: Record | ChangeRecord) -> tuple[str, ...]:
    """What is said beside the notices."""
    if isinstance(record, ChangeRecord):
        return ()
    outlook = None if record.outlook is None else outlook_sentence(record.outlook, record.source_lead)
    return tuple(filter(None, (outlook, lead_sentence(record.source_lead))))


def rewrite(file: Path, alter: Callable[[State], State]) -> None:
    """Put other weights into a file."""
    tensors = alter({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def reconfigure(file: Path, **fields: Any) -> None:
    """Put other values into a JSON file; None takes a field away."""
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


# -- the three good endings


@dataclass(frozen=True)
class Right:
    """The same change as from the sound input, up to a share of its size."""

    within: float = 1e-6
    clean: Callable[[Stage], Outcome] = Stage.clean
    because: str = ""
    """Why that is so, for the page."""
    sentence: str = ""
    """What is said all the same."""

    def told(self) -> str:
        share = "" if self.within < 1e-4 else f", up to {self.within:.0%}"
        also = f" It says: *{self.sentence}*" if self.sentence else ""
        return f"**right**: {self.because or 'the change is that of the sound input'}{share}.{also}"

    def hold(self, case: Case, stage: Stage) -> None:
        found, clean = case.run(stage), self.clean(stage)
        off = distance(found.change, clean.change)
        assert off <= self.within, f"{case.name}: {off:.1e} from the sound input's"
        if self.sentence:
            assert_said(self.sentence, found.said)


@dataclass(frozen=True)
class Refused:
    """An error of that class, by its cause."""

    error: type[BicoError]
    sentence: str

    def told(self) -> str:
        return f"**refused** (`{self.error.__name__}`): *{self.sentence}*"

    def hold(self, case: Case, stage: Stage) -> None:
        with pytest.raises(self.error) as caught:
            case.run(stage)
        assert type(caught.value) is self.error
        assert_said(self.sentence, (caught.value.cause,))
        assert caught.value.remedy


@dataclass(frozen=True)
class Said:
    """A sentence that says so: a notice, the outlook, or one about the fine-tuned source."""

    sentence: str

    def told(self) -> str:
        return f"**said**: *{self.sentence}*"

    def hold(self, case: Case, stage: Stage) -> None:
        assert_said(self.sentence, case.run(stage).said)


@dataclass(frozen=True)
class Case:
    """An input that looks fine."""

    about: str
    """What of the input is wrong: the part of the page."""
    looks: str
    is_not: str
    ending: Right | Refused | Said
    run: Callable[[Stage], Outcome]

    @property
    def name(self) -> str:
        return self.run.__name__


CASES: list[Case] = []


def case(about: str, looks: str, is_not: str, ending: Right | Refused | Said) -> Callable[[Any], Any]:
    """Add a case, played by the function below."""

    def add(run: Callable[[Stage], Outcome]) -> Callable[[Stage], Outcome]:
        CASES.append(Case(about, looks, is_not, ending, run))
        return run

    return add


def distance(change: Mapping[str, Tensor], clean: Mapping[str, Tensor]) -> float:
    """|change - clean| / |clean|, over all tensors that either of them changes."""
    pairs = [(change.get(name), clean.get(name)) for name in {*change, *clean}]
    off = sum(
        float(((0 if a is None else a.double()) - (0 if b is None else b.double())).square().sum()) for a, b in pairs
    )
    return (off / sum(float(b.double().square().sum()) for _, b in pairs if b is not None)) ** 0.5


def assert_said(sentence: str, found: tuple[str, ...]) -> None:
    """One of the sentences is this one, whatever its measured numbers are."""
    assert _unnumbered(sentence) in [_unnumbered(one) for one in found], f"{found} lacks {sentence!r}"


def _unnumbered(sentence: str) -> str:
    """Without the numbers that depend on how a machine rounds."""
    return re.sub(r"\d+(\.\d+)?%|-?\d+\.\d+", "#", sentence)
