"""Command lines whose errors name the page that says more."""

import argparse
import difflib
import re
import sys
from typing import NoReturn

from arealite.utils.doc_pages import TROUBLESHOOTING, more

PAGE = f"{TROUBLESHOOTING}#a-command-line-is-refused"
_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)$", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """One that ends a usage error with the choice that a word resembles, and with the page."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with status 2."""
        if choice := _CHOICE.search(message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), n=1)
            message += "".join(f". Did you mean {one}?" for one in near)
        self.print_usage(sys.stderr)
        self.exit(2, "\n".join([f"{self.prog}: error: {message}", *more(PAGE)]) + "\n")
