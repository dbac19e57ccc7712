"""Check one machine: its devices, disks, limits and software, and that its ranks reach each other."""
