import sys

from headway.runtime.command import run_command
from headway.runtime.command_line import call
from trainer.command import command

run_command(lambda argv: call(command, argv, "python -m trainer"), sys.argv[1:])
