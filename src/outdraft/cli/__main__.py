"""`python -m outdraft.cli` is `outdraft`."""

from outdraft.cli import main

main()
