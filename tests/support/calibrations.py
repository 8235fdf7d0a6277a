"""Draws of samples as pairs of toys see them, without a pipeline around."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_bico.data.draw import draw
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import make_heads
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan, with_model_defaults
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import Settings
from support.language_toys import fine_tuned, sentences, write_decoder, write_t5
from support.scenes import make_scene

SAMPLES = 8


def clip(folder: Path, library: str) -> dict[str, Any]:
    scene = make_scene(folder, (library, library))
    return {"source": scene.tuned, "to": scene.target, "base": scene.base, "data": str(scene.data)}


def texts(folder: Path, write: Callable[..., Path], auto: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    base, target = write(folder / "base"), write(folder / "target", width=24, blocks=3, seed=1)
    return {"source": fine_tuned(base, folder / "tuned", auto), "to": target, "base": base, "data": rows}


PLAIN = [{"text": text} for text in sentences(SAMPLES)]
LABELLED = [{"text": text, "label": "no" if number % 2 else "yes"} for number, text in enumerate(sentences(SAMPLES))]
PORTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "open_clip": lambda folder: clip(folder, "open_clip"),
    "transformers": lambda folder: clip(folder, "transformers"),
    "decoder": lambda folder: texts(folder, write_decoder, transformers.AutoModelForCausalLM, PLAIN),
    "t5": lambda folder: texts(folder, write_t5, transformers.AutoModelForSeq2SeqLM, LABELLED),
}


def planned_of(models: dict[str, Any]) -> Plan:
    return plan(models["source"], models["to"], base=models["base"], data=models["data"]).fetched()


def make_calibration(repos: dict[str, Any], method: str = "bico") -> Calibration:
    planned = planned_of(repos)
    base, target = planned.lineage.base.layout, planned.lineage.target.layout
    settings = with_model_defaults(
        Settings(n=SAMPLES, batch_size=4, dtype="float64", method=method, alpha=1.0, augment=0), base, target
    )
    models = ModelPair.open(planned, settings, torch.device("cpu"), Stopwatch())
    models = models.of_towers(("",), settings.objective) if base.text_blocks else models
    drawn = draw(repos["data"], settings, reads=base.reads)
    heads = make_heads(models, drawn.data.class_names, drawn)
    return Calibration(models, drawn, heads, Stopwatch(), settings, keeps=False)
