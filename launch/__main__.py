"""Runs in the background, from a terminal: `python -m launch --help` lists the commands."""

from launch.commands import main

if __name__ == "__main__":
    main()
