"""Commands about a run on many hosts: the file that starts it, and how its last start ended."""
