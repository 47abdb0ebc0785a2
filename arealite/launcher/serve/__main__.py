"""`python -m arealite.launcher.serve`: one inference server, made ready for its run and handed back."""

import sys

from arealite.launcher.serve.serve import main

sys.exit(main())
