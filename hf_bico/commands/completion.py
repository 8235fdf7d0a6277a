"""The command that teaches a shell to complete the others: completion."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hf_bico.edge.ending import edge
from hf_bico.edge.options import Choice, output_options
from hf_bico.edge.sections import SectionedHelp
from hf_bico.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_PROGRAM, _VARIABLE = "hf-bico", "_HF_BICO_COMPLETE"


@click.command(cls=SectionedHelp, short_help="Tab completion for your shell.")
@click.argument("shell", required=False, type=Choice(SHELLS))
@output_options
def completion(shell: str | None, as_json: bool, quiet: bool) -> None:
    """Print the script by which SHELL completes commands, options, methods, folders and repos of the Hub cache.

    SHELL is bash, zsh or fish; by default the one of $SHELL. Put the line below into your ~/.bashrc or ~/.zshrc; for
    fish, write the script into a file once.

    \b
    Examples:
      eval "$(hf-bico completion bash)"
      eval "$(hf-bico completion zsh)"
      hf-bico completion fish > ~/.config/fish/completions/hf-bico.fish
    """
    with edge():
        shell = shell or _own_shell()
        script = _script(click.get_current_context().find_root().command, shell)
        if as_json:
            click.echo(json.dumps({"shell": shell, "script": script}))
        elif not quiet:
            click.echo(script, nl=False)


def _own_shell() -> str:
    path = os.environ.get("SHELL", "")
    if Path(path).name not in SHELLS:
        raise UsageError(f"the shell is not known by $SHELL, which is '{path}'", f"name one of: {', '.join(SHELLS)}")
    return Path(path).name


def _script(group: click.Command, shell: str) -> str:
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"this release of click knows no completion for {shell}", f"name one of: {', '.join(SHELLS)}")
    script = found(group, {}, _PROGRAM, _VARIABLE).source()
    # click's own would cut a value at its first comma: --methods naive,theseus
    return script.replace('string split ","', 'string split --max 1 ","')
