"""`python -m manta`, which is the command `manta`."""

from cluster.cli.main import main

if __name__ == "__main__":
    main()
