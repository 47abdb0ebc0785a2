"""An argument parser whose usage errors suggest the closest choice."""

import argparse
import difflib
import re
import sys
from typing import NoReturn

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)$", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Adds the closest choice to a usage error."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        if choice := _CHOICE.search(message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), n=1)
            message += "".join(f". Did you mean {name}?" for name in near)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")
