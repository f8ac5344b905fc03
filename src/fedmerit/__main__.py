"""``python -m fedmerit``: the command line, where no script is on the PATH."""

from fedmerit.cli import main

if __name__ == "__main__":
    main()
