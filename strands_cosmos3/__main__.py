"""``python -m strands_cosmos3``: the command line, e.g. under torchrun."""

from strands_cosmos3.cli import program

if __name__ == "__main__":
    program()
