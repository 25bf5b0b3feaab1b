import sys

from headway.runtime.command import run_command
from headway.runtime.command_line import call
from inference_server.command import command

run_command(lambda argv: call(command, argv, "python -m inference_server"), sys.argv[1:])
