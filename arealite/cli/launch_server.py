"""`python3 -m arealite.cli.launch_server`: another name of `arealite serve`, which `--help` explains."""

import sys

from arealite.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
