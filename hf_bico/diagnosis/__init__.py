"""A diagnosis: what was found between two models, as data, tables and pictures. Measures nothing."""

from __future__ import annotations

from hf_bico.diagnosis.findings import UNTOUCHED, Cost, Drift, Findings, InputLikeness, OutputLikeness, Place, by_place
from hf_bico.diagnosis.results import JSON_FILE, Diagnosis, require_own

__all__ = [
    "JSON_FILE",
    "UNTOUCHED",
    "Cost",
    "Diagnosis",
    "Drift",
    "Findings",
    "InputLikeness",
    "OutputLikeness",
    "Place",
    "by_place",
    "require_own",
]
