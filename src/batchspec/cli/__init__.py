"""The command line: one file per command. Heavy imports happen inside the commands, so that --help is quick."""
