"""`python -m jaxgrpo`: the command line."""

import sys

from jaxgrpo.cli import main

sys.exit(main())
