"""Print what `make floors` installs: the oldest release of each package that pyproject.toml allows, exactly.

What the tests need beside these is of any release, but for the dependency group `floors`.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from support import ROOT


def requirements(content: dict[str, Any]) -> list[str]:
    """Turn the lower bounds of the dependencies into the only releases; of the extra `dev`, leave those out.

    >>> project = {"dependencies": ["click>=8.2"], "optional-dependencies": {"dev": ["click>=9", "pytest>=8.3"]}}
    >>> requirements({"project": project, "dependency-groups": {"floors": ["pandas<3"]}})
    ['click==8.2', 'pytest>=8.3', 'pandas<3']
    """
    project = content["project"]
    oldest = {_name(line): line.replace(">=", "==") for line in project["dependencies"]}
    beside = [line for line in project["optional-dependencies"]["dev"] if _name(line) not in oldest]
    return [*oldest.values(), *beside, *content["dependency-groups"]["floors"]]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    print(*requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())), sep="\n")
