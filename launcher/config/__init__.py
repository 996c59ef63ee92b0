"""Launcher flags and settings: the flag table, the configuration file and the rules between settings."""
