"""The command line. Imports nothing heavy until a command runs."""

from __future__ import annotations

import click

from hf_bico.commands.changing import apply, extract
from hf_bico.commands.comparing import compare
from hf_bico.commands.measuring import evaluate
from hf_bico.commands.porting import plan, port, rerun
from hf_bico.commands.publishing import card, push
from hf_bico.version import __version__


class _Commands(click.Group):
    """Commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hf-bico")
def main() -> None:
    """Carry what a fine-tuned model learnt to another pretrained model, without training.

    \b
    Examples:
      hf-bico plan user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico port user/vit-b16-eurosat --to laion/ViT-B-16-plus --push-to user/vit-b16-plus-eurosat
      hf-bico eval user/vit-b16-plus-eurosat --data user/eurosat
      hf-bico compare user/vit-b16-eurosat --to laion/ViT-B-16-plus --methods theseus,bico -n 10,100
      hf-bico port user/eurosat-lora --to laion/ViT-B-16-plus
      hf-bico extract user/vit-b16-eurosat --rank 16
      hf-bico apply user/eurosat-lora --alpha 0.5 -o merged

    Models and data sets are Hub ids (OWNER/NAME, OWNER/NAME@REVISION) or folders; models also by open_clip's own names
    (ViT-B-16-plus-240/laion400m_e32).
    """


for _command in (port, plan, compare, evaluate, extract, apply, rerun, card, push):
    main.add_command(_command)
