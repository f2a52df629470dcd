"""`python -m rolloutd.cli` is rolloutctl, where no such command is on the path."""

import sys

from rolloutd.cli.main import main

sys.exit(main())
