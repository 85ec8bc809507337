"""`python -m megappo`: the same as the command `megappo`."""

from megappo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
