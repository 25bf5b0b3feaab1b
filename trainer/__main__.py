import sys

from headway.runtime.command import run_command
from headway.runtime.command_line import call
from headway.runtime.ending import end_process
from trainer.command import command

try:
    run_command(lambda argv: call(command, argv, "python -m trainer"), sys.argv[1:])
except SystemExit as end:
    if not isinstance(end.code, int):
        raise
    # Threads of process groups may abort an interpreter that frees what they use.
    end_process(end.code)
