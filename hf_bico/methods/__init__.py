"""The methods that carry a task vector between models, each one small file, behind one registry.

A method turns the source's change at each matched site into a change of the target's site. It knows sites,
statistics and tensors; not models, files or the Hub.
"""

from __future__ import annotations

from hf_bico.methods.base import Carried, Method, SiteDelta
from hf_bico.methods.bico import Bico
from hf_bico.methods.naive import Naive

METHODS: dict[str, type[Method]] = {"bico": Bico, "naive": Naive}

__all__ = ["METHODS", "Bico", "Carried", "Method", "Naive", "SiteDelta"]
