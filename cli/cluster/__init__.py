"""Define the commands for runs on many hosts: ``trilith launch`` and ``trilith status``."""
