"""The commands, alone or under torchrun: `python -m vdpp_core --help` lists them."""

from vdpp_core.cli.main import main

if __name__ == "__main__":
    main()
