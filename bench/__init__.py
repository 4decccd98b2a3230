"""The command line: one file per subcommand, one subcommand per question a user has."""
