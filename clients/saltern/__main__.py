"""``python -m saltern`` is the ``saltern`` command."""

import sys

from saltern.cli import main

if __name__ == "__main__":
    sys.exit(main())
