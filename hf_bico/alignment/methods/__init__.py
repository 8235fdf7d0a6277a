"""The methods that bring a task to another model; `hf_bico.settings` names and describes them.

A carrier turns the source's change at each matched site into a change of the target's site; a trainer trains the target
instead, for comparison. They know sites, statistics and tensors; not models, files or the Hub.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from hf_bico.settings import METHODS, Settings

if TYPE_CHECKING:
    from hf_bico.alignment.methods.base import Method


def make_method(name: str, settings: Settings) -> Method:
    """Make a registered method with these settings."""
    return method_class(name)(replace(settings, method=name))


def method_class(name: str) -> type[Method]:
    """Return the class of a registered method, importing its module if need be."""
    found = METHODS[name].implementation
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    return found
