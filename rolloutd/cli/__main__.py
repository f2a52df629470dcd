"""`python -m rolloutd.cli`: rolloutctl without an installed script."""

import sys

from rolloutd.cli.main import main

sys.exit(main())
