import sys

from headway.runtime.command import import_main, run_command

run_command(lambda argv: import_main("inference_server.main")(argv), sys.argv[1:])
