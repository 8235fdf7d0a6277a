"""Shell completion, as a real bash does it: commands, choices, methods after commas, folders and cached repos."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_bico.cli.first_steps import SHELLS
from hf_bico.cli.main import main
from support import forks

BIN = Path(sys.executable).parent
HEAVY = ("torch", "transformers", "huggingface_hub", "datasets", "numpy", "open_clip", "rich")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Folders to choose from, and a Hub cache."""
    for folder in ("models/narrow", "models/wide", "data", ".hidden", "home/hub/models--org--vit", "home/hub/version"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("models--org--other", "models--gpt2", "datasets--org--photos"):
        (tmp_path / "home" / "hub" / name).mkdir()
    return tmp_path


def bash(line: str, here: Path, **environment: str) -> list[str]:
    """What bash offers for the last word of a line, by the script as it would be sourced."""
    words = line.split(" ")
    given = " ".join(f"'{word}'" for word in words)
    code = (
        'eval "$(hf-bico completion bash)"\n'
        f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}\n"
        "_hf_bico_completion hf-bico\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    own = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HF_HOME": str(here / "home"), **environment}
    own.pop("HF_HUB_CACHE", None)
    done = subprocess.run(["bash", "-c", code], cwd=here, env=own, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@needs_bash
def test_bash_completes(here: Path) -> None:
    assert bash("hf-bico p", here) == ["port", "plan", "push"]
    assert bash("hf-bico port x --overw", here) == ["--overwrite"]
    assert bash("hf-bico port x --method bico-", here) == ["bico-fisher", "bico-path", "bico-last"]
    assert bash("hf-bico compare x --methods naive,the", here) == ["naive,theseus"]
    assert bash("hf-bico plan ", here) == ["data/", "home/", "models/", "gpt2", "org/other", "org/vit"]
    assert bash("hf-bico plan x --to mod", here) == ["models/", "models/narrow/", "models/wide/"]
    assert bash("hf-bico port x --data org", here) == ["org/photos"]
    assert bash("hf-bico port x --unlabelled org", here) == ["org/photos"]
    assert bash("hf-bico compare x --unlabelled da", here) == ["data/"]


@needs_bash
def test_a_name_that_a_shell_would_act_on_is_not_offered(here: Path) -> None:
    for name in ("models$(touch pwned)", "models`id`", "models and more", "models;ls", "-models"):
        (here / name).mkdir()
    os.mkdir(os.fsencode(here) + b"/models\xff")
    (here / "home" / "hub" / "models--org--$(touch pwned)").mkdir()
    assert bash("hf-bico card mod", here) == ["models/", "models/narrow/", "models/wide/"]
    assert bash("hf-bico plan org", here) == ["org/other", "org/vit"]
    assert bash("hf-bico card ~nobody-of-that-name/", here) == []
    assert not (here / "pwned").exists()


def offered(words: str, here: Path, monkeypatch: pytest.MonkeyPatch, shell: str = "bash") -> list[str]:
    """The answer of this process, as the shell's script asks for it."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("HF_HOME", str(here / "home"))
    environment = {"_HF_BICO_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=environment).invoke(main, [], prog_name="hf-bico")
    assert result.exit_code == 0, result.output
    return [line.partition(",")[2] for line in result.stdout.split()]


def test_methods_complete_once_each_and_all_of_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("hf-bico compare x --methods all", here, monkeypatch) == ["all"]
    found = offered("hf-bico compare x --methods naive,theseus,", here, monkeypatch)
    assert "naive,theseus,bico" in found
    assert not any(line.endswith((",naive", ",theseus")) for line in found)


def test_folders_go_deeper_and_hidden_ones_are_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("hf-bico card models/n", here, monkeypatch) == ["models/narrow/"]
    assert offered("hf-bico card .", here, monkeypatch) == [".hidden/"]
    assert offered("hf-bico apply models/narrow models/", here, monkeypatch) == ["models/narrow/", "models/wide/"]
    assert offered("hf-bico eval nothing/", here, monkeypatch) == []


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_is_where_the_hub_client_looks(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_bico.cli.completion import cached_ids

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    below = {"HF_HUB_CACHE": "hub", "HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": ""}[name]
    hub = {"XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub", "HF_HOME": "hub"}.get(name, "hub")
    root = here / "elsewhere"
    (root / hub / "models--a--b").mkdir(parents=True)
    monkeypatch.setenv(name, str(root / below))
    assert cached_ids("model") == ["a/b"]
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    done = forks.run(code=code, check=True)
    assert Path(done.stdout.strip()) == root / hub


def test_a_completion_imports_nothing_heavy(here: Path) -> None:
    code = (
        "import sys\nfrom hf_bico.cli.main import main\n"
        "try:\n    main(prog_name='hf-bico')\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    own = {"_HF_BICO_COMPLETE": "bash_complete", "COMP_WORDS": "hf-bico plan x --to ", "COMP_CWORD": "4"}
    environment = {**os.environ, **own, "HF_HOME": str(here / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "plain,org/vit" in done.stdout
    assert done.stdout.rpartition("LOADED")[2].split() == []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_its_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    assert "_HF_BICO_COMPLETE" in script
    assert f"{shell}_complete" in script
    assert CliRunner().invoke(main, ["completion"]).stdout == script, "the shell is that of $SHELL"
    assert json.loads(CliRunner().invoke(main, ["completion", "--json"]).stdout) == {"shell": shell, "script": script}


def test_fish_keeps_what_follows_a_comma() -> None:
    script = CliRunner().invoke(main, ["completion", "fish"]).stdout
    assert 'string split --max 1 ","' in script
    assert 'string split ","' not in script


def test_an_unknown_shell_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    result = CliRunner().invoke(main, ["completion"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1] == "Remedy: name one of: bash, zsh, fish"
