import sys

from headway.runtime.command import run_command
from trainer.main import main

run_command(main, sys.argv[1:])
