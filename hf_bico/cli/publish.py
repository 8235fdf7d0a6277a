"""Defines the commands for a folder that hf-bico wrote: card and push."""

from __future__ import annotations

from typing import Any

import click

from hf_bico.cli.completion import complete_folder
from hf_bico.cli.console import echo, echo_json, print_pushed
from hf_bico.cli.exit import exit_on_error
from hf_bico.cli.options import HUB, SectionedHelp, output_options, push_options, title_option, token_option
from hf_bico.errors import RepoNotFoundError
from hf_bico.reports.record import read_any, with_title
from hf_bico.utils.files import expanded


@click.command(cls=SectionedHelp, short_help="Write the model card of a result again.")
@click.argument("folder", shell_complete=complete_folder)
@title_option
@output_options
def card(folder: str, title: str | None, as_json: bool, quiet: bool) -> None:
    """Write the model card of FOLDER again, from its record alone.

    A new title is put into the record too; an empty one brings back the usual title.

    \b
    Examples:
      hf-bico card vit-b16-eurosat-to-ViT-B-16-plus
      hf-bico card vit-b16-eurosat-to-ViT-B-16-plus --title "EuroSAT for ViT-B-16-plus"
    """
    with exit_on_error():
        from hf_bico.reports.model_cards import write_card

        path = expanded(folder)
        if not path.is_dir():
            raise RepoNotFoundError(f"there is no folder '{folder}'", "name a folder that hf-bico wrote")
        record = read_any(path)
        if title is not None:
            record = with_title(record, title)
            record.write(path)
        file = write_card(record, path)
        if as_json:
            echo_json({"card": str(file)})
        elif not quiet:
            echo(f"Written to {file}")


@click.command(cls=SectionedHelp, short_help="Push a result to the Hub as one commit.")
@click.argument("folder", shell_complete=complete_folder)
@click.argument("repo")
@push_options
@HUB.option("--overwrite", is_flag=True, help="Replace the files of a repo that is there already.")
@HUB.option("--force", is_flag=True, help="Push although the port measured worse than its target.")
@token_option
@output_options
def push(folder: str, repo: str, token: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Push FOLDER, which hf-bico wrote, to the Hub repo REPO as one commit.

    \b
    Examples:
      hf-bico push vit-b16-eurosat-to-ViT-B-16-plus user/vit-b16-plus-eurosat
      hf-bico push out user/vit-b16-plus-eurosat --create-pr
    """
    with exit_on_error() as ending:
        from hf_bico.hub.client import Hub
        from hf_bico.hub.push import PushOptions
        from hf_bico.porting.publish import push_folder

        ending.interrupted = f"look at {repo} before you push again"
        pushed = push_folder(expanded(folder), repo, PushOptions(**options), Hub(token))
        if as_json:
            echo_json(vars(pushed))
        elif not quiet:
            print_pushed(pushed)
