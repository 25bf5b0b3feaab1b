import sys

from headway.runtime.command import run_command
from inference_server.main import main

run_command(main, sys.argv[1:])
