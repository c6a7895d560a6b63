"""The command line: one file for each subcommand, each a frozen dataclass of options with a
``run`` method.
"""
